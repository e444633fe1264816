#include "runtime/pool.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <ranges>
#include <sstream>

#include "runtime/check.h"
#include "runtime/edge.h"

namespace tapeline {
namespace {

constexpr size_t kLine = 64, kPage = 4096;

size_t round_up(size_t bytes, size_t step) {
  return (std::max<size_t>(bytes, 1) + step - 1) / step * step;
}

// Whether the host, or work on `stream`, may use the memory without waiting.
bool idle(const LastUses& uses, const Stream* stream = nullptr) {
  return std::all_of(uses.begin(), uses.end(), [&](const Event& use) {
    return use.stream == stream || use.done();
  });
}

void end_out_of_memory(size_t bytes, Tag tag, const PoolStats& stats) {
  std::ostringstream out;
  out << "out of memory: " << bytes << " bytes for " << name_of(tag) << "\n";
  for (size_t t = 0; t < kTags; ++t) {
    out << "  " << name_of(static_cast<Tag>(t)) << ": live "
        << stats.live_bytes[t] << " peak " << stats.peak_bytes[t] << " bytes\n";
  }
  out << "  reserved " << stats.reserved << " bytes";
  if (out_of_memory != nullptr) out_of_memory(out.str());
  CHECK(false) << out.str();
}

}  // namespace

std::string_view name_of(Tag tag) {
  constexpr std::string_view kNames[kTags] = {
      "parameter", "gradient", "optimizer", "activation", "workspace", "other"};
  return kNames[static_cast<int>(tag)];
}

std::string_view name_of(MemoryEvent event) {
  constexpr std::string_view kNames[] = {
      "allocate", "free", "gone", "evict", "load", "drop", "refill", "replay"};
  return kNames[static_cast<int>(event)];
}

size_t size_class(size_t bytes) {
  return round_up(bytes,
                  bytes <= kPage ? kLine : std::bit_floor(bytes - 1) / 4);
}

void wait_for(Stream& stream, const Event& event) {
  if (event.stream != &stream && !event.done()) stream.wait(event);
}

// Free memory that serves, idle if possible, and the newest of its size, whose
// bytes are the likeliest to be in cache. Null: there is none.
Pool::MemoryPtr Pool::take(size_t bytes, const Stream* stream) {
  auto first = free_.lower_bound(bytes);
  while (first != free_.end() && first->second.empty()) ++first;
  if (first == free_.end()) return nullptr;
  const size_t largest = pinned_ || settled_ ? first->first : bytes;
  for (const bool wait : {false, true}) {
    for (auto at = first; at != free_.end() && at->first <= largest; ++at) {
      std::vector<MemoryPtr>& list = at->second;
      for (size_t i = list.size(); i-- > 0;) {
        if (!wait && !idle(list[i]->uses, stream)) continue;
        const MemoryPtr found = list[i];
        list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
        return found;
      }
    }
  }
  return nullptr;
}

// Host memory, or an address that stands for it; null beyond the cap.
std::byte* Pool::system_bytes(size_t bytes) const {
  const int64_t after = stats_.reserved + static_cast<int64_t>(bytes);
  if (cap_ > 0 && after > cap_) return nullptr;
  static std::atomic<uintptr_t> next_dry{1 << 20};
  if (dry_) return reinterpret_cast<std::byte*>(next_dry.fetch_add(bytes));
  void* data = system_.allocate
                   ? system_.allocate(bytes)
                   : std::aligned_alloc(pinned_ ? kPage : kLine, bytes);
  return static_cast<std::byte*>(data);
}

Pool::MemoryPtr Pool::from_system(size_t bytes) {
  if (pinned_) give_up_largest();
  std::byte* data = system_bytes(bytes);
  while (data == nullptr && give_up_largest()) data = system_bytes(bytes);
  if (data == nullptr) return nullptr;
  ++stats_.system_allocations;
  stats_.reserved += static_cast<int64_t>(bytes);
  stats_.peak_reserved = std::max(stats_.peak_reserved, stats_.reserved);
  return std::make_shared<Memory>(data, bytes);
}

// Returns free memory to the system after its last use. False: there is none.
bool Pool::give_up_largest() {
  for (auto& [capacity, list] : std::views::reverse(free_)) {
    if (list.empty()) continue;
    const Memory& memory = *list.back();
    for (const Event& use : memory.uses) {
      if (!use.done()) const_cast<Stream*>(use.stream)->synchronize(use);
    }
    note(MemoryEvent::kGone, {memory.data, capacity});
    if (!dry_)
      system_.free ? system_.free(memory.data) : std::free(memory.data);
    stats_.reserved -= static_cast<int64_t>(capacity);
    list.pop_back();
    return true;
  }
  return false;
}

void Pool::count(Tag tag, int64_t bytes) {
  int64_t& live = stats_.live_bytes[static_cast<size_t>(tag)];
  int64_t& peak = stats_.peak_bytes[static_cast<size_t>(tag)];
  live += bytes;
  stats_.live += bytes;
  peak = std::max(peak, live);
  stats_.peak = std::max(stats_.peak, stats_.live);
}

// Work queued on the old contents must still find them.
void Pool::poison(const Memory& memory, Stream* stream) const {
  if (!poison_ || dry_) return;
  constexpr uint16_t kWord = 0x7fff;
  const size_t words = memory.capacity / sizeof(kWord);
  if (system_.device_only) {
    // Behind that work, which the stream has been made to wait for.
    if (stream != nullptr) {
      stream->fill(memory.data, &kWord, sizeof(kWord),
                   static_cast<int64_t>(words));
    }
  } else if (idle(memory.uses)) {
    std::fill_n(reinterpret_cast<uint16_t*>(memory.data), words, kWord);
  }
}

Block Pool::allocate(size_t bytes, Tag tag, Stream* stream) {
  Block block{nullptr, pinned_ ? round_up(bytes, kPage) : size_class(bytes),
              tag};
  std::unique_lock lock(mutex_);
  block.memory = take(block.bytes, stream);
  if (block.memory == nullptr) block.memory = from_system(block.bytes);
  if (block.memory == nullptr) {
    ++stats_.refusals;
    if (pinned_) return {};
    end_out_of_memory(bytes, tag, stats_);
  }
  count(tag, static_cast<int64_t>(block.bytes));
  lock.unlock();
  Memory& memory = *block.memory;
  block.data = memory.data;
  block.generation = ++memory.generation;
  if (holds(pinned_ ? Edge::kSlotWaitsLoad : Edge::kBlockWaitsCopyOut)) {
    for (const Event& use : memory.uses) wait_for(*stream, use);
  }
  poison(memory, stream);
  note(MemoryEvent::kAllocate, block);
  return block;
}

void Pool::free(const Block& block, const LastUses& uses) {
  if (block.memory == nullptr) return;
  Memory& memory = *block.memory;
  CHECK(block.owned()) << "a block is given back twice";
  note(MemoryEvent::kFree, block);
  ++memory.generation;
  // Nobody asks a stream that is gone.
  memory.uses = idle(uses) ? LastUses() : uses;
  poison(memory, nullptr);
  std::lock_guard lock(mutex_);
  count(block.tag, -static_cast<int64_t>(block.bytes));
  free_[memory.capacity].push_back(block.memory);
}

PoolStats Pool::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

void Pool::reset_peak() {
  std::lock_guard lock(mutex_);
  stats_.peak_bytes = stats_.live_bytes;
  stats_.peak = stats_.live;
}

void Pool::trim() {
  std::lock_guard lock(mutex_);
  while (give_up_largest()) continue;
}

}  // namespace tapeline
