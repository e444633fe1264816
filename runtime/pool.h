// A caching memory pool with byte accounting by tag: the memory of a device, or
// the pinned host memory that copies to and from it go through.
//
// allocate() returns a block of at least `bytes` from those that are free, and
// when none of them fits from the system. free() keeps the block for reuse; its
// last uses are events, and whoever gets the block while one is not done waits
// for it on its stream: nobody polls, and nothing stalls before memory is short
// of idle blocks. A steady step allocates nothing.
//
// Device memory: sizes are classes, aligned to 64, and a free block of the same
// class serves, an idle one if possible. Nothing returns to the system before
// trim() or destruction; only a request that the cap or the system refuses
// first gives up free blocks, the largest first and as many as it takes,
// waiting for those still used. Refused for good, it ends the process
// (out_of_memory).
//
// Pinned memory: sizes are whole pages, and the smallest block that is large
// enough serves, used or not: what grows does not depend on the speed of
// copies. When none is, the largest free one gives way to the new one, so that
// lengths which vary cost no more than the longest. A request that the cap or
// the system refuses, when all free blocks are given up, gets a null block: the
// caller keeps its bytes where they are.
//
// NaN-poison mode fills blocks with 0x7fff words (NaN in f32, bf16 and f64, a
// huge number in i32) when they are handed out and when they come back, so a
// read of memory nobody wrote cannot look right. Blocks whose queued use is not
// done are left alone, and those that the host cannot touch when they come
// back. A dry pool accounts for memory it does not have:
// addresses that nobody may touch. Thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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

// Events after which a block is free: of kernels, a load, a copy out.
using LastUses = std::array<Event, 3>;

// Obtained from the system; one block after the other is made of it.
struct Memory {
  std::byte* data = nullptr;
  size_t capacity = 0;
  LastUses uses;            // by its last owner
  uint64_t generation = 0;  // counts who got it and who gave it back
};

struct Block {
  std::byte* data = nullptr;  // null: refused
  size_t bytes = 0;           // what was asked for, rounded up
  Tag tag = Tag::kOther;
  std::shared_ptr<Memory> memory;
  uint64_t generation = 0;

  // Of one that was handed out: it is not freed, its bytes are nobody else's.
  bool owned() const { return memory->generation == generation; }
};

struct PoolStats {
  std::array<int64_t, kTags> live_bytes{};  // of blocks handed out
  std::array<int64_t, kTags> peak_bytes{};
  int64_t live = 0, peak = 0;               // over all tags
  int64_t reserved = 0, peak_reserved = 0;  // obtained from the system
  int64_t system_allocations = 0;           // calls to the system so far
  int64_t refusals = 0;                     // by the cap or the system
};

// What happens to memory, for who logs it or checks accesses.
enum class MemoryEvent : uint8_t {
  kAllocate,
  kFree,
  kGone,  // back to the system
  kEvict,
  kLoad,
  kDrop,
  kRefill,
  kReplay,
};
std::string_view name_of(MemoryEvent event);
using MemoryHook = std::function<void(MemoryEvent event, const Block& block)>;

enum class MemoryKind : uint8_t { kDevice, kPinned };

// Where a pool's memory comes from; without functions the host's heap.
struct SystemMemory {
  std::function<void*(size_t bytes)> allocate;  // null: refused
  std::function<void(void*)> free;
  // The host may not touch it: poison is the stream's work.
  bool device_only = false;
};

class Pool {
 public:
  explicit Pool(MemoryKind kind = MemoryKind::kDevice, bool dry = false,
                SystemMemory system = {})
      : pinned_(kind == MemoryKind::kPinned),
        dry_(dry),
        system_(std::move(system)) {}
  ~Pool() { trim(); }

  // For work on `stream`, which waits for the last uses of the memory.
  Block allocate(size_t bytes, Tag tag, Stream* stream);
  void free(const Block& block, const LastUses& uses);

  PoolStats stats() const;
  void reset_peak();  // live peaks := live
  void set_poison(bool on) { poison_ = on; }
  void set_cap(int64_t bytes) { cap_ = bytes; }  // 0: none
  void trim();  // returns every free block to the system
  // From now on a request takes a free block of any larger size before it asks
  // the system. While a pool grows that would cost memory: small requests would
  // take what large ones are about to want. Afterwards what served the longest
  // step serves all others, whose sizes are between the classes it has.
  void settle() { settled_ = true; }

  // One hook, called at every event by the thread that causes it; it does not
  // call the pool.
  void set_hook(MemoryHook hook) { hook_ = std::move(hook); }
  void note(MemoryEvent event, const Block& block) const {
    if (hook_) hook_(event, block);
  }

 private:
  using MemoryPtr = std::shared_ptr<Memory>;

  MemoryPtr take(size_t bytes, const Stream* stream);
  std::byte* system_bytes(size_t bytes) const;
  MemoryPtr from_system(size_t bytes);
  bool give_up_largest();
  void count(Tag tag, int64_t bytes);
  void poison(const Memory& memory, Stream* stream) const;

  const bool pinned_, dry_;
  const SystemMemory system_;
  mutable std::mutex mutex_;
  std::map<size_t, std::vector<MemoryPtr>> free_;  // by capacity
  PoolStats stats_;
  std::atomic<int64_t> cap_ = 0;
  std::atomic<bool> poison_ = false, settled_ = false;
  MemoryHook hook_;
};

// What ends the process when there is no memory, given the wanted bytes and the
// live bytes by tag; it must not return, nor call the pool. Null: a CHECK.
inline void (*out_of_memory)(const std::string& report) = nullptr;

// Capacity that a request of `bytes` gets on a device: a multiple of 64 below
// 4 KiB, then four classes per power of two, so at most a quarter is lost.
size_t size_class(size_t bytes);

// Makes later work of the stream follow the event, if it does not anyway.
void wait_for(Stream& stream, const Event& event);

}  // namespace tapeline
