// Whether streams wait for each other where they must: here everything runs at once, so nothing else would show it.
//
// A stream knows of another what it was up to (its newest launch) when an event was recorded that the first one has
// waited for.  What the host has waited for, everybody knows: whatever is launched later comes later.
//   race    a launch uses what another stream has written, or writes what it uses, without knowing of that launch;
//           memory counts as written when it is allocated, by the stream that it is allocated on
//   freed   memory goes back to its stream, which does not know of a launch of another one that uses it
// Memory is told apart by storages: two streams that work on two halves of one storage look like a race.
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
using Known = std::map<StreamKey, long>;  // the newest launch of each stream that somebody knows to come before

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

Known known_at(StreamKey stream, long launch) {  // by whoever waits for the stream now
  Known known = known_by[stream];
  known[stream] = launch;
  return known;
}

bool knows(StreamKey who, StreamKey stream, long launch) {
  return who == stream || known_by[who][stream] >= launch || known_by[HOST][stream] >= launch;
}

std::string race(StreamKey stream, long launch, const Use& use) {  // what is wrong with it, if anything
  auto found = memories.find(use.memory);
  if (found == memories.end()) return "";
  auto& [home, writer, written, uses, registered] = found->second;
  std::string wrong;
  if (!knows(stream, writer, written)) wrong = show(stream) + " does not wait for what " + show(writer) + " writes";
  if (use.writes)
    for (auto& [other, last] : std::exchange(uses, {}))
      if (!knows(stream, other, last)) wrong = show(stream) + " writes what " + show(other) + " uses";
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
