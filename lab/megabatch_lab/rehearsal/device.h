// The device that is not there: its streams, its events, and what the host has been told of it (see fake_cuda.cpp).
//
// launch   every operation of the CUDA key; `lag` of them later an event that was recorded before counts as complete
// queue    of a stream: what the host sees late, done in order up to a position.  Three kinds of entries:
//            to_host     the bytes of a non-blocking copy into pinned memory, which a completed event makes visible
//            from_host   what pinned memory held when it was copied; if it changes before the copy is done: a hazard
//            wait        for another stream's queue, up to a position
// sync     the host waits for the device: counted, and reported to Python, which knows the line
#pragma once
#include "ordering.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

extern "C" void (*fake_cuda_report)(const char* kind, const char* name, int device, long stream, long copy) = nullptr;

namespace {
using namespace c10;
constexpr int MAX_DEVICES = 64, STREAMS = 32;  // of a device
constexpr long PATIENCE = 100;                 // queries without a launch between them, after which polling is waiting
constexpr long ALL = 1L << 40;                 // positions
using Clock = std::chrono::steady_clock;

int num_devices = 8;
long lag = 20;
bool tracing = false;  // launches and allocations are reported too
thread_local DeviceIndex device = 0;
thread_local StreamId current[MAX_DEVICES] = {};

struct Block {  // of pinned memory.  Copies in flight hold it: what was freed is not handed out again before they end
  DataPtr memory;
  size_t size;
};
struct Entry {
  enum { to_host, from_host, wait } kind;
  long position, launch;
  long copy = 0;  // its number
  std::shared_ptr<Block> block = nullptr;
  char* host = nullptr;
  std::string bytes = "";
  StreamKey other = {};
  long other_position = 0;
};
struct Progress {  // of an event or a stream, as far as the host may know
  long launch = -ALL, polls = 0, polled_at = -1;
};
struct Queue {
  long position = 0, num_from_host = 0;
  long passed = -ALL;  // the launch up to which the host knows that the device has come
  Progress newest;
  std::deque<Entry> entries;
};
struct Event {
  StreamKey stream;
  long position;
  Progress progress;
  Known known;               // by whoever waits for it
  bool is_complete = false;  // as the host knows
  Clock::time_point time;
};
struct Report {
  std::string kind, name;
  StreamKey stream;
  long copy = 0;
};
using Reports = std::vector<Report>;

// Never destroyed: threads of torch outlive static objects.
auto& lock = *new std::mutex;
auto& queues = *new std::map<StreamKey, Queue>;
auto& counts = *new std::map<std::tuple<std::string, std::string, StreamKey>, int64_t>;
long launches = 0, copies = 0;
int streams_made[MAX_DEVICES] = {};

StreamKey stream_of(DeviceIndex index) { return {index, current[index]}; }

void tell(const Report& report) {
  {
    std::lock_guard guard(lock);
    ++counts[{report.kind, report.name, report.stream}];
  }
  if (!fake_cuda_report || (!tracing && (report.kind == "launch" || report.kind == "allocation"))) return;
  fake_cuda_report(report.kind.c_str(), report.name.c_str(), report.stream.first, report.stream.second, report.copy);
}

// What is to be told waits until the lock is free: Python's callback takes the GIL, whose holder may wait for the lock.
template <class Act>
void locked(Act act, Reports reports = {}) {
  {
    std::lock_guard guard(lock);
    act(reports);
  }
  for (auto& report : reports) tell(report);
}

void check_source(const Entry& entry, StreamKey stream, Reports& reports) {
  if (std::memcmp(entry.host, entry.bytes.data(), entry.bytes.size()))
    reports.push_back({"hazard", "pinned memory changed under a copy", stream, entry.copy});
}

void complete(StreamKey stream, long position, Reports& reports) {  // under the lock
  auto& queue = queues[stream];
  while (!queue.entries.empty() && queue.entries.front().position <= position) {
    const Entry entry = std::move(queue.entries.front());
    queue.entries.pop_front();
    if (entry.kind == Entry::to_host) std::memcpy(entry.host, entry.bytes.data(), entry.bytes.size());
    if (entry.kind == Entry::wait) complete(entry.other, entry.other_position, reports);
    if (entry.kind == Entry::from_host) --queue.num_from_host, check_source(entry, stream, reports);
  }
}

void enqueue(StreamKey stream, Entry entry) {  // under the lock
  auto& queue = queues[stream];
  entry.position = ++queue.position;
  entry.launch = launches;
  queue.num_from_host += entry.kind == Entry::from_host;
  queue.entries.push_back(std::move(entry));
}

void launch(const std::string& name, StreamKey stream, const std::vector<Use>& uses) {
  auto act = [&](Reports& reports) {
    queues[stream].newest.launch = ++launches;
    for (auto& use : uses)
      if (auto wrong = race(stream, launches, use); !wrong.empty())
        reports.push_back({"hazard", name + ": " + wrong, stream});
    for (auto& [key, queue] : queues)  // the device reads a source sooner or later, whether or not anybody asks
      if (queue.num_from_host)
        queue.num_from_host -= std::erase_if(queue.entries, [&](const Entry& entry) {
          const bool is_read = entry.kind == Entry::from_host && entry.launch + lag <= launches;
          if (is_read) check_source(entry, key, reports);
          return is_read;
        });
  };
  locked(act, {{"launch", name, stream}});
}

void complete_all(StreamKey stream, Reports& reports) {  // under the lock
  queues[stream].passed = launches;
  learn(HOST, known_at(stream, launches));
  complete(stream, ALL, reports);
}

void sync(const std::string& what, StreamKey stream) {
  locked([&](Reports& reports) { complete_all(stream, reports); }, {{"sync", what, stream}});
}

// True when the device may have got there; or when the host has asked so often that it waits.
bool has_passed(Progress& progress, const char* what, StreamKey stream) {
  bool passed = false;
  locked([&](Reports& reports) {
    progress.polls = progress.polled_at == launches ? progress.polls + 1 : 1;
    progress.polled_at = launches;
    passed = launches >= progress.launch + lag || progress.launch <= queues[stream].passed;
    if (passed || progress.polls < PATIENCE) return;
    passed = true;
    reports.push_back({"sync", std::string(what) + ", polled", stream});
  });
  return passed;
}

struct Guard final : impl::DeviceGuardImplInterface {
  static StreamKey key(const Stream& stream) { return {stream.device_index(), stream.id()}; }
  static DeviceIndex index(Device of) { return of.has_index() ? of.index() : device; }
  static Stream make(Device of, StreamId id) { return Stream(Stream::UNSAFE, Device(kCUDA, index(of)), id); }
  static Event& event(void* pointer) { return *static_cast<Event*>(pointer); }

  DeviceType type() const override { return kCUDA; }
  Device getDevice() const override { return {kCUDA, device}; }
  void setDevice(Device to) const override {
    TORCH_CHECK(to.index() >= 0 && to.index() < num_devices, "invalid device ordinal ", int(to.index()));
    device = to.index();
  }
  Device exchangeDevice(Device to) const override {
    const Device old = getDevice();
    setDevice(to);
    return old;
  }
  void uncheckedSetDevice(Device to) const noexcept override { device = to.index(); }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }

  Stream getStream(Device of) const override { return make(of, current[index(of)]); }
  Stream getDefaultStream(Device of) const override { return make(of, 0); }
  Stream getStreamFromGlobalPool(Device of, bool) const override {
    std::lock_guard guard(lock);
    return make(of, 1 + streams_made[index(of)]++ % STREAMS);
  }
  Stream getNewStream(Device of, int) const override { return getStreamFromGlobalPool(of, false); }
  Stream exchangeStream(Stream to) const override {
    return make(to.device(), std::exchange(current[to.device_index()], to.id()));
  }

  void record(void** pointer, const Stream& stream, const DeviceIndex, const EventFlag) const override {
    std::lock_guard guard(lock);
    if (!*pointer) *pointer = new Event;
    const auto known = known_at(key(stream), launches);
    event(*pointer) = {key(stream), queues[key(stream)].position, {launches}, known, false, Clock::now()};
  }
  void destroyEvent(void* pointer, const DeviceIndex) const noexcept override { delete static_cast<Event*>(pointer); }
  void block(void* pointer, const Stream& stream) const override {
    if (!pointer || event(pointer).stream == key(stream)) return;
    std::lock_guard guard(lock);
    learn(key(stream), event(pointer).known);
    for (auto& entry : queues[event(pointer).stream].entries)
      if (entry.position <= event(pointer).position && entry.kind != Entry::from_host) {
        Entry wait{Entry::wait};
        std::tie(wait.other, wait.other_position) = std::tie(event(pointer).stream, event(pointer).position);
        return enqueue(key(stream), std::move(wait));
      }
  }
  static void finish(Event& event, Reports reports) {
    auto act = [&](Reports& more) {
      event.is_complete = true;
      queues[event.stream].passed = std::max(queues[event.stream].passed, event.progress.launch);
      learn(HOST, event.known);
      complete(event.stream, event.position, more);
    };
    locked(act, std::move(reports));
  }
  bool queryEvent(void* pointer) const override {
    if (!pointer || event(pointer).is_complete) return true;
    if (!has_passed(event(pointer).progress, "event.query", event(pointer).stream)) return false;
    finish(event(pointer), {});
    return true;
  }
  void synchronizeEvent(void* pointer) const override {
    if (pointer && !event(pointer).is_complete)
      finish(event(pointer), {{"sync", "event.synchronize", event(pointer).stream}});
  }
  bool queryStream(const Stream& stream) const override {
    if (!has_passed(queues[key(stream)].newest, "stream.query", key(stream))) return false;
    locked([&](Reports& reports) { complete_all(key(stream), reports); });
    return true;
  }
  void synchronizeStream(const Stream& stream) const override { sync("stream.synchronize", key(stream)); }
  void synchronizeDevice(const DeviceIndex index) const override {
    auto act = [&](Reports& reports) {
      for (auto& [stream, queue] : queues)
        if (stream.first == index) complete_all(stream, reports);
    };
    locked(act, {{"sync", "device synchronize", stream_of(index)}});
  }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& stream) const override {
    auto act = [&](Reports&) {
      if (auto found = memories.find(data.get()); found != memories.end()) found->second.registered.insert(key(stream));
    };
    locked(act, {{"record_stream", "", key(stream)}});
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(event(to).time - event(from).time).count();
  }
};
}  // namespace
