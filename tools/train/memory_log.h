// MemoryLog: what a program does to the pool, part by part.
//
// While it lives it sees every event of the current device's pool. A part is a
// stretch of one pass (forward, backward, replay; "" outside of both) in one
// layer: layers.3, mtp.0, lm_head. Parts make the timeline; bytes that are live
// when the first backward of a step begins are what the forward pass kept, by
// the layer that allocated them. Bytes are size classes of the pool, as its
// statistics count them.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "runtime/device.h"
#include "runtime/json.h"
#include "runtime/pool.h"

namespace tapeline {

struct MemoryPart {
  std::string pass, layer;
  int64_t start = 0, peak = 0, end = 0;  // live bytes
  friend bool operator==(const MemoryPart&, const MemoryPart&) = default;
};

// Of everything since the log began or was last taken.
struct MemoryProfile {
  std::vector<MemoryPart> timeline;
  std::map<std::string, int64_t> kept;  // by layer; activations, workspaces
  int64_t peak = 0;
  MemoryPart peak_at;
  std::array<int64_t, kTags> by_tag{};  // at the peak
  int64_t head_peak = 0;                // of bytes that heads allocated
  int64_t evicted = 0, loaded = 0, dropped = 0, replays = 0;
};

class MemoryLog {
 public:
  // With `lines` every event is also kept as a line of memory.jsonl.
  explicit MemoryLog(Device& device, bool lines = false);
  ~MemoryLog();
  MemoryLog(const MemoryLog&) = delete;
  MemoryLog& operator=(const MemoryLog&) = delete;

  MemoryProfile take();
  std::string take_lines();
  // Counters of live bytes by tag, for chrome://tracing and Perfetto.
  std::string chrome_trace() const;

 private:
  struct Owner {
    std::string layer;
    int64_t bytes;
    Tag tag;
  };
  void see(MemoryEvent event, const Block& block);
  MemoryPart& part();
  void add_line(MemoryEvent event, const Block& block);

  Device& device_;
  const bool lines_;
  MemoryProfile profile_;
  absl::flat_hash_map<const std::byte*, Owner> owners_;
  int64_t live_ = 0, head_live_ = 0;
  std::array<int64_t, kTags> live_by_tag_{};
  bool was_backward_ = false;
  double start_ = 0;
  std::string text_, trace_;
};

Json to_json(const MemoryPart& part);

}  // namespace tapeline
