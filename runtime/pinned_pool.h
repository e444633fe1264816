// Host memory that copies to and from a device go through.
//
// lease() hands out the smallest free slot that holds the bytes; when none
// does, the largest free one that is too small gives way to a new one, so that
// lengths which vary cost no more than the longest. A slot returns with the
// event of its last copy, either way; the next owner's copy waits for it. Every
// lease has a generation: bytes that were overwritten by another owner are
// found out when they are read. Slots are exact, rounded to pages. A cap in
// bytes makes lease() return null: the caller keeps its bytes where they are.
// One thread per device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/pool.h"
#include "runtime/stream.h"

namespace tapeline {

struct PinnedSlot {
  std::byte* data = nullptr;
  size_t bytes = 0;
  uint64_t generation = 0;  // of the last lease
  Event last_use;
  bool leased = false;
};

struct PinnedStats {
  int64_t bytes = 0, leased_bytes = 0;  // of slots
  int64_t requested_bytes = 0;          // of the leases that are out
  int64_t peak_bytes = 0;               // of `bytes`
  int64_t system_allocations = 0;       // calls to the system so far
  int64_t refusals = 0;                 // by the cap or the system
};

class PinnedPool {
 public:
  explicit PinnedPool(bool dry = false) : dry_(dry) {}
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  PinnedSlot* lease(size_t bytes);
  void give_back(PinnedSlot* slot, size_t bytes, const Event& last_use);

  void set_cap(int64_t bytes) { cap_ = bytes; }  // 0: none
  void set_region_hook(RegionHook hook) { region_ = std::move(hook); }
  const PinnedStats& stats() const { return stats_; }

 private:
  void make_room(size_t bytes);
  void tell(Region region, const PinnedSlot& slot) const {
    if (region_) region_(region, slot.data, slot.bytes);
  }

  const bool dry_;
  int64_t cap_ = 0;
  std::vector<std::unique_ptr<PinnedSlot>> slots_;
  PinnedStats stats_;
  RegionHook region_;
};

}  // namespace tapeline
