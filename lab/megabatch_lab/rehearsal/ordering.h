// Detect missing waits between streams.  Here every operation runs at once, so results would not show them.
//
// When a stream waits for an event, it learns the newest launch of the other stream at the time of the record.  All
// streams know the launches for which the host has waited, because later launches come after them.
//   race    a launch reads memory that another stream wrote, or writes memory that it uses, without knowing of that
//           launch; an allocation counts as a write by its stream
//   freed   memory returns to its stream, which does not know of a launch of another stream that uses it
// Memory is identified by storage: two streams that use two halves of one storage look like a race.
#pragma once
#include <c10/core/Stream.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {
using namespace c10;
using StreamKey = std::pair<DeviceIndex, StreamId>;
using Known = std::map<StreamKey, long>;  // the newest launch of each stream that is known to come before

struct Use {
  const void* memory;
  bool writes;
};
struct Memory {
  StreamKey home;
  StreamKey writer;
  long written;
  Known uses;                      // since it was written
  std::set<StreamKey> registered;  // by record_stream
};

const StreamKey HOST{-1, -1};
auto& memories = *new std::map<const void*, Memory>;
auto& known_by = *new std::map<StreamKey, Known>;

std::string show(StreamKey stream) { return "stream " + std::to_string(stream.second); }

void learn(StreamKey who, const Known& news) {
  for (auto& [stream, launch] : news) known_by[who][stream] = std::max(known_by[who][stream], launch);
}

Known known_at(StreamKey stream, long launch) {  // by a stream that waits for it now
  Known known = known_by[stream];
  known[stream] = launch;
  return known;
}

bool knows(StreamKey who, StreamKey stream, long launch) {
  return who == stream || known_by[who][stream] >= launch || known_by[HOST][stream] >= launch;
}

std::string race(StreamKey stream, long launch, const Use& use) {  // returns the problem, or ""
  auto found = memories.find(use.memory);
  if (found == memories.end()) return "";
  auto& [home, writer, written, uses, registered] = found->second;
  std::string wrong;
  if (!knows(stream, writer, written)) wrong = show(stream) + " does not wait for a write of " + show(writer);
  if (use.writes)
    for (auto& [other, last] : std::exchange(uses, {}))
      if (!knows(stream, other, last)) wrong = show(stream) + " writes memory in use on " + show(other);
  if (use.writes) writer = stream, written = launch;
  uses[stream] = launch;
  return wrong;
}

std::string freed(const void* pointer) {
  auto found = memories.find(pointer);
  if (found == memories.end()) return "";
  const auto [home, writer, written, uses, registered] = found->second;
  memories.erase(found);
  for (auto& [other, last] : uses)
    if (!registered.count(other) && !knows(home, other, last))
      return "freed on " + show(home) + ", in use on " + show(other);
  return "";
}
}  // namespace
