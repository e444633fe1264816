// A caching memory pool with byte accounting by tag.
//
// allocate() returns a block of at least `bytes`, aligned to 64, from a free
// list of the same size class, or one up to twice as large, and when there is
// none from the system. free() keeps the block for reuse; its last uses are
// events, and whoever gets the block while one is not done waits for it on its
// stream: nobody polls, and nothing stalls before memory is short of idle
// blocks. Nothing returns to the system before trim() or destruction, so a
// steady step allocates nothing; only a request that the cap or the system
// refuses first gives back free blocks of other sizes, at last those still
// used, for which the host waits. NaN-poison mode fills blocks with 0x7fff
// words (NaN in f32, bf16 and f64, a huge number in i32) when they are handed
// out and when they come back, so a read of memory nobody wrote cannot look
// right. Blocks whose queued use is not done are left alone. A dry pool
// accounts for memory it does not have: addresses that nobody may touch.
// Thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "runtime/stream.h"

namespace tapeline {

enum class Tag : uint8_t {
  kParameter,
  kGradient,
  kOptimizer,
  kActivation,
  kWorkspace,
  kOther,
};
inline constexpr int kTags = 6;
std::string_view name_of(Tag tag);

struct Block {
  std::byte* data = nullptr;
  size_t bytes = 0;     // the size class that was asked for
  size_t capacity = 0;  // of the memory
  Tag tag = Tag::kOther;
};
// Events after which a block is free: of kernels, a load, a copy out.
using LastUses = std::array<Event, 3>;

struct PoolStats {
  std::array<int64_t, kTags> live_bytes{};  // size-class bytes handed out
  std::array<int64_t, kTags> peak_bytes{};
  int64_t live = 0, peak = 0;      // over all tags
  int64_t reserved = 0;            // obtained from the system
  int64_t system_allocations = 0;  // calls to the system so far
};

// What happens to memory, for who logs it.
enum class MemoryEvent : uint8_t {
  kAllocate,
  kFree,
  kEvict,
  kLoad,
  kDrop,
  kRefill,
  kReplay,
};
std::string_view name_of(MemoryEvent event);
using MemoryHook = std::function<void(MemoryEvent event, const Block& block)>;

// Memory that gets an owner, loses it, or returns to the system; told to who
// checks accesses (fake_device.h).
enum class Region : uint8_t { kOwned, kFree, kGone };
using RegionHook =
    std::function<void(Region region, const std::byte* data, size_t bytes)>;

class Pool {
 public:
  explicit Pool(bool dry = false);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // For work on `stream`. When `cap` or the system refuses, ends the process
  // (set_out_of_memory).
  Block allocate(size_t bytes, Tag tag, Stream* stream);
  void free(Block block, const LastUses& uses);

  PoolStats stats() const;
  void reset_peak();  // peaks := live
  void set_poison(bool on);
  bool poison() const;
  void set_cap(int64_t bytes);  // 0: none
  void trim();                  // returns every free block to the system
  // From now on a request takes a free block of any larger size before it asks
  // the system. While a pool grows that would cost memory: small requests would
  // take what large ones are about to want. Afterwards what served the longest
  // step serves all others, whose sizes are between the classes it has.
  void settle();
  std::string report() const;  // one line per tag

  // Called at every event by the thread that causes it, outside of any lock.
  void set_hook(MemoryHook hook);
  void set_region_hook(RegionHook hook);
  void note(MemoryEvent event, const Block& block) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// What ends the process when there is no memory, given the wanted bytes and the
// live bytes by tag; it must not return. Default: a CHECK.
void set_out_of_memory(void (*handler)(const std::string& report));

// Capacity that a request of `bytes` gets: a multiple of 64 below 4 KiB, then
// four classes per power of two, so at most a quarter is lost.
size_t size_class(size_t bytes);

namespace internal {
// Host memory, or with `dry` an address that stands for it.
std::byte* system_allocate(size_t alignment, size_t bytes, bool dry);
void system_free(std::byte* data, bool dry);
}  // namespace internal

}  // namespace tapeline
