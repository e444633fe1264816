// A caching memory pool with byte accounting by tag.
//
// allocate() returns a block of at least `bytes`, aligned to 64, from a free
// list of the same size class or, when that is empty, from the system. free()
// keeps the block for reuse; a block freed with a last-use event that is not
// done is only handed to the stream it was last used on (stream-ordered reuse)
// or to anybody once the event is done. Nothing returns to the system before
// trim() or destruction, so a steady step allocates nothing; only a request
// that the cap or the system refuses first gives back free blocks of other
// sizes. NaN-poison mode fills blocks with 0x7fff words (NaN in f32, bf16 and
// f64, a huge number in i32) when they are handed out and when they come back,
// so a read of memory nobody wrote cannot look right. Blocks whose queued use
// is not done are left alone. Thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
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
  size_t bytes = 0;  // capacity: the size class
  Tag tag = Tag::kOther;
};

struct PoolStats {
  std::array<int64_t, kTags> live_bytes{};  // size-class bytes handed out
  std::array<int64_t, kTags> peak_bytes{};
  int64_t live = 0, peak = 0;      // over all tags
  int64_t reserved = 0;            // obtained from the system
  int64_t system_allocations = 0;  // calls to the system so far
};

class Pool {
 public:
  Pool();
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // When `cap` or the system refuses, ends the process (set_out_of_memory).
  Block allocate(size_t bytes, Tag tag, const Stream* stream);
  // `stream` is where the block was last used; last_use its event there.
  void free(Block block, const Stream* stream, const Event& last_use);

  PoolStats stats() const;
  void reset_peak();  // peaks := live
  void set_poison(bool on);
  bool poison() const;
  void set_cap(int64_t bytes);  // 0: none
  void trim();                  // returns every free block to the system
  std::string report() const;   // one line per tag

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

}  // namespace tapeline
