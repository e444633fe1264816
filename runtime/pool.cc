#include "runtime/pool.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "runtime/check.h"

namespace tapeline {
namespace {

void (*out_of_memory)(const std::string& report) = nullptr;

constexpr uint16_t kPoison = 0x7fff;

void poison_block(const Block& block) {
  auto* words = reinterpret_cast<uint16_t*>(block.data);
  std::fill_n(words, block.bytes / sizeof(uint16_t), kPoison);
}

struct FreeBlock {
  std::byte* data;
  // Null once the last use is done: nobody asks a stream that is gone.
  const Stream* stream;
  Event last_use;
};

}  // namespace

std::string_view name_of(Tag tag) {
  constexpr std::string_view kNames[kTags] = {
      "parameter", "gradient", "optimizer", "activation", "workspace", "other"};
  return kNames[static_cast<int>(tag)];
}

size_t size_class(size_t bytes) {
  if (bytes <= 64) return 64;
  if (bytes <= 4096) return (bytes + 63) / 64 * 64;
  const size_t step = std::bit_floor(bytes - 1) / 4;
  return (bytes + step - 1) / step * step;
}

struct Pool::State {
  mutable std::mutex mutex;
  absl::flat_hash_map<size_t, std::vector<FreeBlock>> free;
  PoolStats stats;
  std::atomic<bool> poison = false;
  int64_t cap = 0;

  // A free block of the class for work on `stream`; data is null without one.
  FreeBlock take(size_t bytes, const Stream* stream) {
    std::vector<FreeBlock>& list = free[bytes];
    // Newest first: its bytes are the likeliest to be in cache.
    for (size_t i = list.size(); i-- > 0;) {
      if (!list[i].last_use.done() && list[i].stream != stream) continue;
      const FreeBlock found = list[i];
      list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
      return found;
    }
    return {nullptr, nullptr, {}};
  }

  std::byte* from_system(size_t bytes) {
    const auto size = static_cast<int64_t>(bytes);
    if (cap > 0 && stats.reserved + size > cap) return nullptr;
    auto* data = static_cast<std::byte*>(std::aligned_alloc(64, bytes));
    if (data == nullptr) return nullptr;
    stats.reserved += size;
    ++stats.system_allocations;
    return data;
  }

  // Returns free blocks to the system; with `wait`, also those in use.
  void release(bool wait) {
    for (auto& [bytes, list] : free) {
      std::erase_if(list, [&](const FreeBlock& block) {
        if (!block.last_use.done()) {
          if (!wait) return false;
          const Event& event = block.last_use;
          const_cast<Stream*>(event.stream)->synchronize(event);
        }
        std::free(block.data);
        stats.reserved -= static_cast<int64_t>(bytes);
        return true;
      });
    }
  }

  void count(const Block& block) {
    const auto size = static_cast<int64_t>(block.bytes);
    const auto tag = static_cast<size_t>(block.tag);
    stats.live_bytes[tag] += size;
    stats.live += size;
    stats.peak_bytes[tag] =
        std::max(stats.peak_bytes[tag], stats.live_bytes[tag]);
    stats.peak = std::max(stats.peak, stats.live);
  }
};

void set_out_of_memory(void (*handler)(const std::string& report)) {
  out_of_memory = handler;
}

Pool::Pool() : state_(std::make_unique<State>()) {}
Pool::~Pool() { trim(); }

Block Pool::allocate(size_t bytes, Tag tag, const Stream* stream) {
  State& s = *state_;
  Block block{nullptr, size_class(bytes), tag};
  bool idle = true;
  {
    std::lock_guard lock(s.mutex);
    const FreeBlock found = s.take(block.bytes, stream);
    block.data = found.data;
    idle = found.last_use.done();
    if (block.data == nullptr) block.data = s.from_system(block.bytes);
    if (block.data == nullptr) {
      s.release(/*wait=*/false);
      block.data = s.from_system(block.bytes);
    }
    if (block.data != nullptr) s.count(block);
  }
  if (block.data == nullptr) {
    const std::string what = "out of memory: " + std::to_string(bytes) +
                             " bytes for " + std::string(name_of(tag)) + "\n" +
                             report();
    if (out_of_memory != nullptr) out_of_memory(what);
    CHECK(block.data != nullptr) << what;
  }
  // Work queued on the old contents must still find them.
  if (s.poison && idle) poison_block(block);
  return block;
}

void Pool::free(Block block, const Stream* stream, const Event& last_use) {
  if (block.data == nullptr) return;
  State& s = *state_;
  const bool idle = last_use.done();
  if (s.poison && idle) poison_block(block);
  std::lock_guard lock(s.mutex);
  const auto size = static_cast<int64_t>(block.bytes);
  s.stats.live_bytes[static_cast<size_t>(block.tag)] -= size;
  s.stats.live -= size;
  s.free[block.bytes].push_back(
      {block.data, idle ? nullptr : stream, idle ? Event() : last_use});
}

PoolStats Pool::stats() const {
  std::lock_guard lock(state_->mutex);
  return state_->stats;
}

void Pool::reset_peak() {
  std::lock_guard lock(state_->mutex);
  state_->stats.peak_bytes = state_->stats.live_bytes;
  state_->stats.peak = state_->stats.live;
}

void Pool::set_poison(bool on) { state_->poison = on; }
bool Pool::poison() const { return state_->poison; }

void Pool::set_cap(int64_t bytes) {
  std::lock_guard lock(state_->mutex);
  state_->cap = bytes;
}

void Pool::trim() {
  std::lock_guard lock(state_->mutex);
  state_->release(/*wait=*/true);
}

std::string Pool::report() const {
  const PoolStats now = stats();
  std::ostringstream out;
  for (int t = 0; t < kTags; ++t) {
    out << "  " << name_of(static_cast<Tag>(t)) << ": live "
        << now.live_bytes[t] << " peak " << now.peak_bytes[t] << " bytes\n";
  }
  out << "  reserved " << now.reserved << " bytes";
  return out.str();
}

}  // namespace tapeline
