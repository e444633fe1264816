#include "runtime/pool.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

#include "runtime/check.h"
#include "runtime/edge.h"

namespace tapeline {
namespace {

void (*out_of_memory)(const std::string& report) = nullptr;

constexpr uint16_t kPoison = 0x7fff;

void poison_block(const Block& block) {
  auto* words = reinterpret_cast<uint16_t*>(block.data);
  std::fill_n(words, block.capacity / sizeof(uint16_t), kPoison);
}

struct FreeBlock {
  std::byte* data = nullptr;
  LastUses uses;

  bool idle_for(const Stream* stream) const {
    return std::all_of(uses.begin(), uses.end(), [&](const Event& use) {
      return use.stream == stream || use.done();
    });
  }
};

bool done(const LastUses& uses) {
  return std::all_of(uses.begin(), uses.end(),
                     [](const Event& use) { return use.done(); });
}

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

std::string_view name_of(MemoryEvent event) {
  constexpr std::string_view kNames[] = {"allocate", "free",   "evict", "load",
                                         "drop",     "refill", "replay"};
  return kNames[static_cast<int>(event)];
}

std::byte* internal::system_allocate(size_t alignment, size_t bytes, bool dry) {
  if (!dry) {
    return static_cast<std::byte*>(std::aligned_alloc(alignment, bytes));
  }
  static std::atomic<uintptr_t> next{1 << 20};
  return reinterpret_cast<std::byte*>(next.fetch_add(bytes));
}
void internal::system_free(std::byte* data, bool dry) {
  if (!dry) std::free(data);
}

struct Pool::State {
  mutable std::mutex mutex;
  std::map<size_t, std::vector<FreeBlock>> free;  // by capacity
  PoolStats stats;
  std::atomic<bool> poison = false;
  bool dry = false, settled = false;
  int64_t cap = 0;
  MemoryHook hook;
  RegionHook region;

  // A free block for work on `stream` that is large enough and not `limit`, an
  // idle one if possible.
  FreeBlock take(Block& block, size_t limit, const Stream* stream) {
    for (const bool idle : {true, false}) {
      for (auto at = free.lower_bound(block.bytes);
           at != free.end() && at->first < limit; ++at) {
        std::vector<FreeBlock>& list = at->second;
        // Newest first: its bytes are the likeliest to be in cache.
        for (size_t i = list.size(); i-- > 0;) {
          if (idle && !list[i].idle_for(stream)) continue;
          const FreeBlock found = list[i];
          list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
          block.capacity = at->first;
          return found;
        }
      }
    }
    return {};
  }

  std::byte* from_system(Block& block) {
    const auto size = static_cast<int64_t>(block.bytes);
    if (cap > 0 && stats.reserved + size > cap) return nullptr;
    std::byte* data = internal::system_allocate(64, block.bytes, dry);
    if (data == nullptr) return nullptr;
    stats.reserved += size;
    ++stats.system_allocations;
    block.capacity = block.bytes;
    return data;
  }

  // Returns free blocks to the system; with `wait`, also those in use.
  void release(bool wait) {
    for (auto& [capacity, list] : free) {
      std::erase_if(list, [&](const FreeBlock& block) {
        if (!wait && !done(block.uses)) return false;
        for (const Event& use : block.uses) {
          if (use.done()) continue;
          const_cast<Stream*>(use.stream)->synchronize(use);
        }
        if (region) region(Region::kGone, block.data, capacity);
        internal::system_free(block.data, dry);
        stats.reserved -= static_cast<int64_t>(capacity);
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

Pool::Pool(bool dry) : state_(std::make_unique<State>()) { state_->dry = dry; }
Pool::~Pool() { trim(); }

Block Pool::allocate(size_t bytes, Tag tag, Stream* stream) {
  State& s = *state_;
  Block block{nullptr, size_class(bytes), 0, tag};
  FreeBlock found;
  {
    std::lock_guard lock(s.mutex);
    found = s.take(block, 2 * block.bytes, stream);
    if (found.data == nullptr && s.settled) {
      found = s.take(block, SIZE_MAX, stream);
    }
    block.data = found.data;
    if (block.data == nullptr) block.data = s.from_system(block);
    for (const bool wait : {false, true}) {
      if (block.data != nullptr) break;
      s.release(wait);
      block.data = s.from_system(block);
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
  for (const Event& use : found.uses) {
    if (use.stream == stream || use.done()) continue;
    if (holds(Edge::kBlockWaitsCopyOut)) stream->wait(use);
  }
  // Work queued on the old contents must still find them.
  if (s.poison && !s.dry && done(found.uses)) poison_block(block);
  if (s.region) s.region(Region::kOwned, block.data, block.bytes);
  note(MemoryEvent::kAllocate, block);
  return block;
}

void Pool::free(Block block, const LastUses& uses) {
  if (block.data == nullptr) return;
  note(MemoryEvent::kFree, block);
  State& s = *state_;
  if (s.region) s.region(Region::kFree, block.data, block.bytes);
  const bool idle = done(uses);
  if (s.poison && !s.dry && idle) poison_block(block);
  {
    std::lock_guard lock(s.mutex);
    const auto size = static_cast<int64_t>(block.bytes);
    s.stats.live_bytes[static_cast<size_t>(block.tag)] -= size;
    s.stats.live -= size;
    // Nobody asks a stream that is gone.
    s.free[block.capacity].push_back({block.data, idle ? LastUses() : uses});
  }
}

void Pool::set_hook(MemoryHook hook) { state_->hook = std::move(hook); }
void Pool::set_region_hook(RegionHook hook) {
  state_->region = std::move(hook);
}
void Pool::note(MemoryEvent event, const Block& block) const {
  if (state_->hook) state_->hook(event, block);
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

void Pool::settle() {
  std::lock_guard lock(state_->mutex);
  state_->settled = true;
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
