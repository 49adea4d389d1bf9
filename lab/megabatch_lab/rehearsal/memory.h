// Memory of the fake device, and pinned memory of the host.  Both are CPU memory, identified by address.
#pragma once
#include "device.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace {
auto& pinned = *new std::map<const char*, std::shared_ptr<Block>>;
auto& memory = *new std::array<CachingDeviceAllocator::DeviceStats, MAX_DEVICES>;

// Wraps a result or an allocation of the CPU as memory of a device, and counts it until it is freed.
template <class Holds>
DataPtr on_device(void* data, size_t size, DeviceIndex index, Holds holds) {
  struct Owned {
    Holds holds;
    void* data;
    size_t size;
    StreamKey stream;
  };
  auto* owned = new Owned{std::move(holds), data, size, stream_of(index)};
  auto act = [&](Reports&) {
    memory[index].allocated_bytes[0].increase(size);
    if (data) memories[data] = {owned->stream, owned->stream, launches};
  };
  locked(act, {{"allocation", std::to_string(size), owned->stream}});
  auto release = [](void* pointer) {
    auto* owned = static_cast<Owned*>(pointer);
    locked([&](Reports& reports) {
      memory[owned->stream.first].allocated_bytes[0].decrease(owned->size);
      if (auto wrong = freed(owned->data); !wrong.empty()) reports.push_back({"hazard", wrong, owned->stream});
    });
    delete owned;
  };
  return {data, owned, release, Device(kCUDA, index)};
}

struct DeviceMemory final : DeviceAllocator {
  DataPtr allocate(size_t size) override {
    DataPtr data = GetCPUAllocator()->allocate(size);
    void* pointer = data.get();
    return on_device(pointer, size, device, std::move(data));
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(MempoolId_t) override {}
  void recordStream(const DataPtr& data, Stream stream) override { Guard().recordDataPtrOnStream(data, stream); }
  CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override { return memory[index]; }
  void resetAccumulatedStats(DeviceIndex index) override { memory[index].allocated_bytes[0].reset_accumulated(); }
  void resetPeakStats(DeviceIndex index) override { memory[index].allocated_bytes[0].reset_peak(); }
} device_memory;

struct PinnedMemory final : Allocator {
  DataPtr allocate(size_t size) override {
    auto block = std::make_shared<Block>(Block{GetCPUAllocator()->allocate(size), size});
    auto* data = static_cast<char*>(block->memory.get());
    if (data) locked([&](Reports&) { pinned[data] = block; });
    auto release = [](void* pointer) { locked([&](Reports&) { pinned.erase(static_cast<char*>(pointer)); }); };
    return {data, data, release, Device(kCPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
} pinned_memory;

// Memory that the host allocated, and that it unpins before it frees it.
void pin(char* data, size_t size) {
  locked([&](Reports&) { pinned[data] = std::make_shared<Block>(Block{DataPtr(data, Device(kCPU)), size}); });
}

void unpin(char* data) {
  locked([&](Reports& reports) {
    auto found = pinned.find(data);
    TORCH_CHECK(found != pinned.end(), "this memory was not pinned");
    size_t in_flight = 0;  // they must not read the memory once it is freed
    for (auto& [key, queue] : queues)
      in_flight += std::erase_if(queue.entries, [&](const Entry& entry) {
        if (entry.block != found->second) return false;
        queue.num_from_host -= entry.kind == Entry::from_host;
        return true;
      });
    if (in_flight) reports.push_back({"hazard", "memory unpinned under a copy", {device, 0}});
    pinned.erase(found);
  });
}

std::shared_ptr<Block> pinned_block(const void* data) {
  std::lock_guard guard(lock);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return nullptr;
  auto [begin, block] = *std::prev(after);
  return data < begin + block->size ? block : nullptr;
}
}  // namespace
