// The fake device: its streams, its events, and its progress as seen by the host (see fake_cuda.cpp).
//
// launch   every operation of the CUDA key; an event counts as complete `lag` launches after it was recorded
// queue    delayed effects of a stream on the host, completed in order up to a position.  Three kinds of entries:
//            to_host     the bytes of a non-blocking copy into pinned memory, which a completed event makes visible
//            from_host   the contents of pinned memory at the time of a copy; a change before the end is a hazard
//            wait        a wait for another stream's queue, up to a position
// sync     a wait of the host for the device: counted, and reported to Python, which finds the line
// context  the memory that CUDA takes on a device for a process.  The first call on a device makes it: with CUDA 12,
//          cudaSetDevice and queries of events, which a thread sends to device 0 unless it has set another one
// graph    the operations of a stream between begin and end, repeated by a replay on the same memory.  While a graph is
//          recorded its stream must not be waited for.  After the recording new memory holds NaN: on a GPU nothing ran
// error    a call of CUDA that failed: also the next launch of the thread reports it, and clears it
// hold     the device is in a collective that has not ended: no event recorded since then completes, and a sync waits
#pragma once
#include "ordering.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

extern "C" void (*fake_cuda_report)(const char* kind, const char* name, int device, long stream, long copy) = nullptr;

namespace {
using namespace c10;
constexpr int MAX_DEVICES = 64, STREAMS = 32;  // of a device
constexpr long PATIENCE = 100;                 // queries without a launch in between, after which polling counts as waiting
constexpr long ALL = 1L << 40;                 // positions
using Clock = std::chrono::steady_clock;

int num_devices = 8;
long lag = 20;
bool tracing = false;  // also report launches and allocations
thread_local DeviceIndex device = 0;
thread_local StreamId current[MAX_DEVICES] = {};
thread_local bool has_error = false;

struct Block {  // of pinned memory; copies in flight hold it, so that it is not reused before they end
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
struct Progress {  // of an event or a stream, as known to the host
  long launch = -ALL, polls = 0, polled_at = -1;
};
struct Queue {
  long position = 0, num_from_host = 0;
  long passed = -ALL;  // the newest launch that the host knows to be complete
  Progress newest;
  std::deque<Entry> entries;
};
struct Event {
  StreamKey stream;
  long position;
  Progress progress;
  Known known;               // to a stream that waits for it
  bool is_complete = false;  // known to the host
  Clock::time_point time;
};
struct Graph {
  StreamKey stream;
  std::vector<Use> uses;
  std::vector<std::function<void()>> calls, poisons;
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
auto& contexts = *new std::set<DeviceIndex>;  // of this process
auto& graphs = *new std::map<int64_t, Graph>;
Graph* recording = nullptr;
long launches = 0, copies = 0;
int streams_made[MAX_DEVICES] = {};
std::atomic<long> num_held = 0, held_at = 0;  // collectives that have not ended, and the launch before the oldest

bool is_held(long launch) { return num_held && launch > held_at; }
// Callers of torch's API have released the GIL.
void wait_until_not_held(long launch) {
  while (is_held(launch)) std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

StreamKey stream_of(DeviceIndex index) { return {index, current[index]}; }

void use_context(DeviceIndex of) {
  std::lock_guard guard(lock);
  contexts.insert(of);
}

// Autograd starts a thread for each device.  In a CUDA build, those of devices without a context set no device.
bool is_autograd_thread() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof(name));
  return std::string(name).starts_with("pt_autograd_");
}

// Like c10::cuda::SetDevice, which calls CUDA only if the device changes.
void set_device(DeviceIndex to) {
  if (to != device && !is_autograd_thread()) use_context(to);
  device = to;
}

// CUDAGuardImpl switches to the device of an event and back, also in the destructor.
struct Switched {
  DeviceIndex before = device;
  explicit Switched(DeviceIndex to) { set_device(to); }
  ~Switched() { set_device(before); }
};

void send(const Report& report) {
  {
    std::lock_guard guard(lock);
    ++counts[{report.kind, report.name, report.stream}];
  }
  if (!fake_cuda_report || (!tracing && (report.kind == "launch" || report.kind == "allocation"))) return;
  fake_cuda_report(report.kind.c_str(), report.name.c_str(), report.stream.first, report.stream.second, report.copy);
}

// Reports are sent after the lock is released: the callback takes the GIL, whose holder may wait for the lock.
template <class Act>
void locked(Act act, Reports reports = {}) {
  {
    std::lock_guard guard(lock);
    act(reports);
  }
  for (auto& report : reports) send(report);
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

bool is_recorded(StreamKey stream) { return recording && recording->stream == stream; }

void require_no_capture(const std::string& what, StreamKey stream) {
  TORCH_CHECK(!is_recorded(stream), "CUDA error: operation not permitted when stream is capturing: ", what);
}

void launch(const std::string& name, StreamKey stream, const std::vector<Use>& uses) {
  TORCH_CHECK(!std::exchange(has_error, false), "CUDA error: invalid argument");
  if (is_recorded(stream)) recording->uses.insert(recording->uses.end(), uses.begin(), uses.end());
  auto act = [&](Reports& reports) {
    queues[stream].newest.launch = ++launches;
    contexts.insert(stream.first);
    for (auto& use : uses)
      if (auto wrong = race(stream, launches, use); !wrong.empty())
        reports.push_back({"hazard", name + ": " + wrong, stream});
    for (auto& [key, queue] : queues)  // the device reads a source eventually, without a query
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
  require_no_capture(what, stream);
  wait_until_not_held(ALL);
  locked([&](Reports& reports) { complete_all(stream, reports); }, {{"sync", what, stream}});
}

// True if the device may have reached this point, or if the host has polled so often that it waits.
bool has_passed(Progress& progress, const char* what, StreamKey stream) {
  bool passed = false;
  if (is_held(progress.launch)) return false;
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
    set_device(to.index());
  }
  Device exchangeDevice(Device to) const override {
    const Device old = getDevice();
    setDevice(to);
    return old;
  }
  // Like c10::cuda::MaybeSetDevice: a guard that ends makes no context on the device that it returns to.
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
    Switched switched(stream.device_index());
    std::lock_guard guard(lock);
    if (!*pointer) *pointer = new Event;
    const auto known = known_at(key(stream), launches);
    event(*pointer) = {key(stream), queues[key(stream)].position, {launches}, known, false, Clock::now()};
  }
  void destroyEvent(void* pointer, const DeviceIndex index) const noexcept override {
    if (!pointer) return;
    Switched switched(index);
    delete static_cast<Event*>(pointer);
  }
  void block(void* pointer, const Stream& stream) const override {
    if (!pointer) return;
    Switched switched(stream.device_index());
    if (event(pointer).stream == key(stream)) return;
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
    if (!pointer) return true;
    use_context(device);
    if (event(pointer).is_complete) return true;
    if (!has_passed(event(pointer).progress, "event.query", event(pointer).stream)) return false;
    finish(event(pointer), {});
    return true;
  }
  void synchronizeEvent(void* pointer) const override {
    if (pointer) use_context(device);
    if (pointer) wait_until_not_held(event(pointer).progress.launch);
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
    wait_until_not_held(ALL);
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
  double elapsedTime(void* from, void* to, const DeviceIndex index) const override {
    Switched switched(index);
    return std::chrono::duration<double, std::milli>(event(to).time - event(from).time).count();
  }
};
}  // namespace
