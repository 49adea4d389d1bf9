// A CUDA without a GPU, for a CPU or CUDA build of torch.  What a "cuda" tensor is asked for is done at once by the CPU
// kernel on the same bytes, so results are the CPU's to the bit; device.h keeps back what a host would see late.
//
// A CUDA build has registered its own kernels, device guard, allocator, hooks and DDP timer when torch is imported.
// All of them can be registered again, and the newest or the one of higher priority counts: nothing asks the driver.
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

namespace {
using at::Tensor;
constexpr auto NO_KERNELS = DispatchKey::PrivateUse3;  // a device for which torch registers nothing

// ----------------------------------------------------------------------------------------------------------- kernels
// Resizable, because an `out` may be resized: `adopt` gives the original what its alias has become.
Tensor host_view(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  return at::for_blob(tensor.unsafeGetTensorImpl()->mutable_data(), tensor.sizes())
      .strides(tensor.strides())
      .deleter([storage = tensor.storage()](void*) {})
      .options(tensor.options().device(kCPU))
      .target_device(Device(kCPU))
      .resizeable_storage()
      .allocator(GetCPUAllocator())
      .make_tensor();
}

Tensor on_device(const Tensor& result, DeviceIndex index) {
  if (!result.defined()) return result;
  const size_t size = result.storage().nbytes();
  Storage storage(Storage::use_byte_size_t(), size,
                  on_device(result.storage().mutable_data(), size, index, result.storage()), &device_memory, true);
  const DispatchKeySet keys(DispatchKey::CUDA);
  auto tensor = at::detail::make_tensor<TensorImpl>(std::move(storage), keys, result.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
  return tensor;
}

void adopt(const Tensor& original, const Tensor& alias) {
  if (original.sizes() == alias.sizes() && original.strides() == alias.strides()) return;
  auto* to = original.unsafeGetTensorImpl();
  to->set_storage_keep_dtype(on_device(alias, original.device().index()).storage());
  to->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
}

const std::set<std::string> ASK_THE_DEVICE{  // their result, or its size, is known only when the device is done
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive",
    "aten::bincount", "aten::repeat_interleave"};

void run_on_cpu(const OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  std::optional<Device> on;
  std::vector<std::pair<Tensor, Tensor>> seen;  // with their aliases
  std::vector<Use> uses;
  bool has_mask = false, writes = false;
  auto alias = [&](const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    on = tensor.device();
    uses.push_back({tensor.storage().data(), writes});
    return seen.emplace_back(tensor, host_view(tensor)).second;
  };
  const auto& arguments = op.schema().arguments();
  for (auto value = stack->end() - arguments.size(); value != stack->end(); ++value) {
    const auto* annotation = arguments[arguments.size() - (stack->end() - value)].alias_info();
    writes = annotation && annotation->isWrite();
    if (value->isTensor()) *value = alias(value->toTensor());
    else if (value->isDevice() && value->toDevice().is_cuda()) on = value->toDevice(), *value = Device(kCPU);
    else if (value->isTensorList()) {
      List<Tensor> aliases;
      for (const Tensor& tensor : value->toTensorVector()) aliases.push_back(alias(tensor));
      *value = std::move(aliases);
    } else if (value->isOptionalTensorList()) {
      List<std::optional<Tensor>> aliases;
      for (const std::optional<Tensor>& tensor : value->toOptionalTensorList().vec()) {
        const bool is_index = tensor && tensor->defined();
        has_mask |= is_index && (isIntegralType(tensor->scalar_type(), true) && tensor->element_size() == 1);
        has_mask |= is_index && tensor->is_cpu() && tensor->dim() > 0;  // is copied to the device first
        aliases.push_back(is_index ? std::optional(alias(*tensor)) : tensor);
      }
      *value = std::move(aliases);
    }
  }
  const auto index = on && on->has_index() ? on->index() : device;
  launch(name, stream_of(index), uses);
  if (ASK_THE_DEVICE.count(name) || has_mask) sync(name, stream_of(index));
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  auto back = [&](const Tensor& result) {
    for (auto& [original, alias] : seen)
      if (alias.is_same(result)) return original;
    return on_device(result, index);
  };
  for (auto& [original, alias] : seen) adopt(original, alias);
  for (auto value = stack->end() - op.schema().returns().size(); value != stack->end(); ++value) {
    if (value->isTensor()) *value = back(value->toTensor());
    else if (value->isTensorList()) {
      List<Tensor> results;
      for (const Tensor& tensor : value->toTensorVector()) results.push_back(back(tensor));
      *value = std::move(results);
    }
  }
}

// Between host and device it does not wait only where CUDA's would not: pinned memory that is copied as it lies.
Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  Tensor to = host_view(self), from = host_view(source);
  const auto stream = stream_of((self.is_cuda() ? self : source).device().index());
  std::vector<Use> uses;
  if (source.is_cuda()) uses.push_back({source.storage().data(), false});
  if (self.is_cuda()) uses.push_back({self.storage().data(), true});
  if (self.numel()) launch("aten::copy_", stream, uses);
  if (self.is_cuda() == source.is_cuda() || !self.numel()) return to.copy_(from), self;
  const Tensor& host = self.is_cuda() ? source : self;
  const auto block = pinned_block(host.const_data_ptr());
  const bool is_alike = self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes() &&
                        self.strides() == source.strides() && self.is_non_overlapping_and_dense();
  const bool as_it_lies = is_alike || (host.is_contiguous() && (!self.is_cuda() ||
      (self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes())));
  const std::string name = self.is_cuda() ? "copy to the device" : "copy to the host";
  if (!non_blocking || !block || !as_it_lies) {
    sync(name + (!non_blocking ? ", blocking" : !block ? ", not pinned" : ", not as it lies"), stream);
    return to.copy_(from), self;
  }
  Entry entry{self.is_cuda() ? Entry::from_host : Entry::to_host};
  const Tensor seen = self.is_cuda() ? source : at::empty_like(self).copy_(from);
  if (self.is_cuda()) to.copy_(from);
  entry.block = block;
  entry.host = static_cast<char*>(host.unsafeGetTensorImpl()->mutable_data());
  entry.bytes.assign(static_cast<const char*>(seen.const_data_ptr()), seen.nbytes());
  locked([&](Reports& reports) {
    entry.copy = ++copies;
    reports.push_back({"copy", name, stream, entry.copy});
    enqueue(stream, std::move(entry));
  });
  return self;
}

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> on,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  OptionalDeviceGuard guard(on && on->has_index() ? on : std::nullopt);
  const DispatchKeySet keys(DispatchKey::CUDA);
  return at::detail::empty_generic(size, &device_memory, keys, dtype.value_or(kFloat), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> on, std::optional<bool>) {
  OptionalDeviceGuard guard(on && on->has_index() ? on : std::nullopt);
  const DispatchKeySet keys(DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, dtype.value_or(kFloat));
}

Tensor& set_storage(Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

// ------------------------------------------------------------------------------------------------- what torch asks for
struct Hooks : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices; }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex getCurrentDevice() const override { return device; }
  DeviceIndex current_device() const override { return device; }
  void setCurrentDevice(DeviceIndex to) const override { Guard().setDevice({kCUDA, to}); }
  DeviceIndex exchangeDevice(DeviceIndex to) const override { return Guard().exchangeDevice({kCUDA, to}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return to < 0 ? device : exchangeDevice(to); }
  bool isPinnedPtr(const void* data) const override { return pinned_block(data) != nullptr; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  // The same numbers as on the CPU.
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(DeviceIndex index) const override { Guard().synchronizeDevice(index); }
};

// As torch's own for CUDA: DDP times its first ten iterations and then every hundredth, and waits for its events.
struct DDPTimer final : c10d::Timer {
  std::map<Event, c10::Event> events;
  DDPTimer(Device) {}
  void record(Event which) override {
    Timer::record(which);
    auto [event, is_new] = events.try_emplace(which, kCUDA, EventFlag::BACKEND_DEFAULT);
    event->second.record(Guard().getStream({kCUDA, device}));
  }
  std::optional<int64_t> measureDifference(Event from, Event to) override {
    if (!events.count(from) || !events.count(to)) return std::nullopt;
    events.at(from).synchronize();
    events.at(to).synchronize();
    return *getTimestamp(to) - *getTimestamp(from);
  }
};

Guard guard;
const bool is_installed = [] {
  impl::registerDeviceGuard(kCUDA, &guard);
  SetAllocator(kCUDA, &device_memory, UINT8_MAX);  // the priority: a CUDA build's allocator has more than the default
  // A process that has imported torch may have made its build's hooks, which have no members either: take their place.
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks({});
  return true;
}();

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

// In place of a kernel for a GPU: what a CPU build does without it, so that launches are the same on both builds.
// torch takes the operation apart if it can, as for any device without kernels; otherwise the CPU's kernel runs.
void run_as_without_cuda(const OperatorHandle& op, torch::jit::Stack* stack) {
  if (op.hasComputedKernelForDispatchKey(NO_KERNELS)) op.redispatchBoxed(DispatchKeySet(NO_KERNELS), stack);
  else run_on_cpu(op, stack);
}

struct Silent final : WarningHandler {
  void process(const Warning&) override {}
};

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  Silent silent;  // torch warns when a kernel takes the place of another
  WarningUtils::WarningHandlerGuard no_warnings(&silent);
  for (auto& op : Dispatcher::singleton().getAllOpNames()) {
    if (!op.name.starts_with("aten::")) continue;
    // One launch each, as on CUDA; torch would take them apart here, and convolve by another kernel than the CPU's.
    const bool is_one = op.name.starts_with("aten::_foreach_") || op.name.starts_with("aten::convolution");
    const auto name = toString(op);
    if (is_one) m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    else if (Dispatcher::singleton().findSchema(op)->hasKernelForDispatchKey(DispatchKey::CUDA))
      m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_as_without_cuda>());
  }
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("record_stream", [](Tensor& tensor, Stream stream) {
    Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  });
}

TORCH_LIBRARY(rehearsal, m) {
  m.def("host_view", host_view);
  m.def("launch", [](const std::string& name, at::TensorList read, at::TensorList written) {
    std::vector<Use> uses;
    for (auto& tensor : read) uses.push_back({tensor.storage().data(), false});
    for (auto& tensor : written) uses.push_back({tensor.storage().data(), true});
    launch(name, stream_of(device), uses);
  });
  m.def("set_devices", [](int64_t number) {
    TORCH_CHECK(0 < number && number <= MAX_DEVICES, number, " devices");
    num_devices = number;
  });
  m.def("set_lag", [](int64_t number) { lag = number; });
  m.def("set_tracing", [](bool is_on) { tracing = is_on; });
  m.def("counts", [] {  // by kind, name, device and stream, between tabs
    Dict<std::string, int64_t> result;
    std::lock_guard guard(lock);
    for (auto& [key, count] : counts) {
      auto& [kind, name, stream] = key;
      const auto where = std::to_string(stream.first) + "\t" + std::to_string(stream.second);
      result.insert(kind + "\t" + name + "\t" + where, count);
    }
    return result;
  });
  m.def("reset", [] { locked([](Reports&) { counts.clear(); }); });
}
}  // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(TimerRegistry, c10::kCUDA, c10::REGISTRY_PREFERRED, ::DDPTimer);
}
