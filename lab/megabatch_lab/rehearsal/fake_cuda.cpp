// A fake CUDA for a CPU or CUDA build of torch.  Operations on "cuda" tensors run at once in the CPU kernel on the same
// bytes, so results are bitwise those of the CPU.  device.h delays the effects that a host would see late.
//
// A CUDA build registers kernels, device guard, allocator, hooks and DDP timer when torch is imported.  All of them can
// be registered again, and the newest or the one with the highest priority is used, so the driver is never called.
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
constexpr auto NO_KERNELS = DispatchKey::PrivateUse3;  // a device without kernels

// Resizable, because an `out` may be resized; `adopt` then copies the size of the alias to the original.
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

const std::set<std::string> ASK_THE_DEVICE{  // their result or its size is only known when the device is done
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive",
    "aten::bincount", "aten::repeat_interleave"};

// Operations whose CUDA kernels refuse to run with deterministic algorithms (see torch.use_deterministic_algorithms).
const std::set<std::string> NOT_DETERMINISTIC{
    "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
    "max_unpool2d", "max_unpool3d", "upsample_linear1d_backward", "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward", "upsample_trilinear3d_backward", "_upsample_bilinear2d_aa_backward",
    "_upsample_bicubic2d_aa_backward", "reflection_pad1d_backward", "reflection_pad2d_backward",
    "reflection_pad3d_backward", "nll_loss2d_forward", "_ctc_loss_backward", "put_", "histc", "median",
    "grid_sampler_2d_backward", "grid_sampler_3d_backward"};

void require_deterministic(const OperatorHandle& op, const torch::jit::Stack& stack) {
  if (!at::globalContext().deterministicAlgorithms()) return;
  const auto name = op.schema().name().substr(std::strlen("aten::"));
  const auto& first = stack[stack.size() - op.schema().arguments().size()];
  const bool adds_floats = (name == "cumsum" || name == "cumsum_") && first.toTensor().is_floating_point();
  if (NOT_DETERMINISTIC.count(name) || adds_floats)
    at::globalContext().alertNotDeterministic(name.substr(name[0] == '_') + "_cuda");
}

std::vector<Tensor> tensors_of(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  return value.isTensorList() ? value.toTensorVector() : std::vector<Tensor>();
}

// Adds a call to the graph.  A replay calls it on the same memory, and copies results into that of the recorded ones.
void record(const OperatorHandle& op, const torch::jit::Stack& inputs, const torch::jit::Stack& outputs) {
  std::set<const void*> given;
  for (auto& value : inputs)
    for (auto& tensor : tensors_of(value))
      if (tensor.defined()) given.insert(tensor.storage().data());
  std::vector<Tensor> made;
  for (auto& value : outputs)
    for (auto& tensor : tensors_of(value)) made.push_back(tensor);
  auto is_new = [given](const Tensor& tensor) { return tensor.defined() && !given.count(tensor.storage().data()); };
  recording->calls.push_back([=] {
    auto stack = inputs;
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
    size_t place = 0;
    for (auto& value : stack)
      for (auto& tensor : tensors_of(value))
        if (auto& before = made[place++]; is_new(before)) before.copy_(tensor);
  });
  recording->poisons.push_back([=] {
    for (auto& tensor : made)
      if (is_new(tensor)) std::memset(tensor.storage().mutable_data(), 0xff, tensor.storage().nbytes());
  });
}

void run_on_cpu(const OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  require_deterministic(op, *stack);
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
        has_mask |= is_index && tensor->is_cpu() && tensor->dim() > 0;  // it is copied to the device first
        aliases.push_back(is_index ? std::optional(alias(*tensor)) : tensor);
      }
      *value = std::move(aliases);
    }
  }
  const auto index = on && on->has_index() ? on->index() : device;
  launch(name, stream_of(index), uses);
  if (ASK_THE_DEVICE.count(name) || has_mask) sync(name, stream_of(index));
  const auto num_inputs = arguments.size(), num_outputs = op.schema().returns().size();
  torch::jit::Stack inputs;
  if (is_recorded(stream_of(index))) inputs.assign(stack->end() - num_inputs, stack->end());
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  if (!inputs.empty()) record(op, inputs, torch::jit::Stack(stack->end() - num_outputs, stack->end()));
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

// A copy between host and device is asynchronous under CUDA's conditions: pinned memory and the same memory layout.
Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  Tensor to = host_view(self), from = host_view(source);
  const auto stream = stream_of((self.is_cuda() ? self : source).device().index());
  std::vector<Use> uses;
  if (source.is_cuda()) uses.push_back({source.storage().data(), false});
  if (self.is_cuda()) uses.push_back({self.storage().data(), true});
  if (self.numel()) launch("aten::copy_", stream, uses);
  if (self.is_cuda() == source.is_cuda() || !self.numel()) {
    if (is_recorded(stream)) recording->calls.push_back([=] { to.copy_(from); });
    return to.copy_(from), self;
  }
  require_no_capture("copy between host and device", stream);
  const Tensor& host = self.is_cuda() ? source : self;
  const auto block = pinned_block(host.const_data_ptr());
  const bool is_alike = self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes() &&
                        self.strides() == source.strides() && self.is_non_overlapping_and_dense();
  const bool same_layout = is_alike || (host.is_contiguous() && (!self.is_cuda() ||
      (self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes())));
  const std::string name = self.is_cuda() ? "copy to the device" : "copy to the host";
  if (!non_blocking || !block || !same_layout) {
    sync(name + (!non_blocking ? ", blocking" : !block ? ", not pinned" : ", other layout"), stream);
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

struct Hooks : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex index) const override { return contexts.count(index); }
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

// Like torch's timer for CUDA: DDP times its first ten iterations and then every hundredth, and waits for its events.
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
  SetAllocator(kCUDA, &device_memory, UINT8_MAX);  // the allocator of a CUDA build has more than the default priority
  // torch may already have created the hooks of its build, which have no members either: overwrite them in place.
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks({});
  return true;
}();

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

// Replaces a GPU kernel by the behaviour of a CPU build, so that launches are the same on both builds: torch decomposes
// the operation if it can, as for any device without kernels; otherwise the CPU kernel runs.
void run_as_without_cuda(const OperatorHandle& op, torch::jit::Stack* stack) {
  if (op.hasComputedKernelForDispatchKey(NO_KERNELS)) op.redispatchBoxed(DispatchKeySet(NO_KERNELS), stack);
  else run_on_cpu(op, stack);
}

struct Silent final : WarningHandler {
  void process(const Warning&) override {}
};

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  Silent silent;  // torch warns when a kernel replaces another
  WarningUtils::WarningHandlerGuard no_warnings(&silent);
  for (auto& op : Dispatcher::singleton().getAllOpNames()) {
    if (!op.name.starts_with("aten::")) continue;
    // One launch each, as on CUDA.  Otherwise torch would decompose them and use another convolution kernel.
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
  m.def("pin", [](int64_t address, int64_t size) { pin(reinterpret_cast<char*>(address), size); });
  m.def("unpin", [](int64_t address) { unpin(reinterpret_cast<char*>(address)); });
  m.def("graph_begin", [](int64_t number) {
    graphs[number].stream = stream_of(device);
    recording = &graphs[number];
  });
  m.def("graph_end", [] {
    const auto ended = std::exchange(recording, nullptr);
    for (auto& poison : ended->poisons) poison();
  });
  m.def("graph_replay", [](int64_t number) {
    launch("rehearsal::graph", stream_of(device), graphs.at(number).uses);
    NoGradGuard no_grad;
    for (auto& call : graphs.at(number).calls) call();
  });
  m.def("graph_free", [](int64_t number) { graphs.erase(number); });
  m.def("set_devices", [](int64_t number) {
    TORCH_CHECK(0 < number && number <= MAX_DEVICES, number, " devices");
    num_devices = number;
  });
  m.def("contexts", [] { return std::vector<int64_t>(contexts.begin(), contexts.end()); });
  m.def("hold", [] {  // the newest launch is a collective that has not ended
    std::lock_guard guard(lock);
    if (!num_held++) held_at = launches - 1;
  });
  m.def("release", [] { --num_held; });
  m.def("fail", [] { has_error = true; });
  m.def("set_lag", [](int64_t number) { lag = number; });
  m.def("set_tracing", [](bool is_on) { tracing = is_on; });
  m.def("counts", [] {  // by kind, name, device and stream, separated by tabs
    Dict<std::string, int64_t> result;
    std::lock_guard guard(lock);
    for (auto& [key, count] : counts) {
      auto& [kind, name, stream] = key;
      const auto where = std::to_string(stream.first) + "\t" + std::to_string(stream.second);
      result.insert(kind + "\t" + name + "\t" + where, count);
    }
    return result;
  });
  m.def("reset", [] { locked([](Reports&) { counts.clear(); contexts.clear(); }); });
}
}  // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(TimerRegistry, c10::kCUDA, c10::REGISTRY_PREFERRED, ::DDPTimer);
}
