#include "runtime/pool.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "runtime/check.h"

namespace tapeline {
namespace {

constexpr uint16_t kPoison = 0x7fff;

void poison_block(const Block& block) {
  auto* words = reinterpret_cast<uint16_t*>(block.data);
  std::fill_n(words, block.bytes / sizeof(uint16_t), kPoison);
}

struct FreeBlock {
  std::byte* data;
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
  bool poison = false;
  int64_t cap = 0;
};

Pool::Pool() : state_(std::make_unique<State>()) {}
Pool::~Pool() { trim(); }

Block Pool::allocate(size_t bytes, Tag tag, const Stream* stream) {
  State& s = *state_;
  Block block{nullptr, size_class(bytes), tag};
  const auto size = static_cast<int64_t>(block.bytes);
  bool refused = false;
  {
    std::lock_guard lock(s.mutex);
    std::vector<FreeBlock>& list = s.free[block.bytes];
    // Newest first: its bytes are the likeliest to be in cache.
    for (size_t i = list.size(); i-- > 0;) {
      if (list[i].stream != stream && !list[i].last_use.done()) continue;
      block.data = list[i].data;
      list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
    if (block.data == nullptr) {
      refused = s.cap > 0 && s.stats.reserved + size > s.cap;
      if (!refused) {
        block.data = static_cast<std::byte*>(std::aligned_alloc(64, block.bytes));
        refused = block.data == nullptr;
      }
      if (!refused) {
        s.stats.reserved += size;
        ++s.stats.system_allocations;
      }
    }
    if (!refused) {
      int64_t& live = s.stats.live_bytes[static_cast<int>(tag)];
      live += size;
      s.stats.live += size;
      int64_t& peak = s.stats.peak_bytes[static_cast<int>(tag)];
      peak = std::max(peak, live);
      s.stats.peak = std::max(s.stats.peak, s.stats.live);
    }
  }
  CHECK(!refused) << "out of memory: " << bytes << " bytes for "
                  << name_of(tag) << "\n"
                  << report();
  if (s.poison) poison_block(block);
  return block;
}

void Pool::free(Block block, const Stream* stream, const Event& last_use) {
  if (block.data == nullptr) return;
  State& s = *state_;
  if (s.poison && last_use.done()) poison_block(block);
  std::lock_guard lock(s.mutex);
  const auto size = static_cast<int64_t>(block.bytes);
  s.stats.live_bytes[static_cast<int>(block.tag)] -= size;
  s.stats.live -= size;
  s.free[block.bytes].push_back({block.data, stream, last_use});
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
  for (auto& [bytes, list] : state_->free) {
    for (const FreeBlock& block : list) {
      if (!block.last_use.done()) {
        const_cast<Stream*>(block.last_use.stream)->synchronize(block.last_use);
      }
      std::free(block.data);
      state_->stats.reserved -= static_cast<int64_t>(bytes);
    }
    list.clear();
  }
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
