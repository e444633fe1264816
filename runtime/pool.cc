#include "runtime/pool.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <iterator>
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

// A free block that serves; an idle one if possible, the newest of a size,
// whose bytes are the likeliest to be in cache.
Pool::Free::iterator Pool::find(size_t bytes, const Stream* stream) {
  auto at = free_.lower_bound(bytes), found = free_.end();
  size_t largest = 2 * bytes - 1;
  if (at != free_.end()) {
    if (pinned_) largest = at->first;
    if (settled_) largest = std::max(largest, at->first);
  }
  for (; at != free_.end() && at->first <= largest; ++at) {
    if (idle(at->second->uses, stream)) return at;
    if (found == free_.end()) found = at;
  }
  return found;
}

// Host memory, or an address that stands for it; null beyond the cap.
std::byte* Pool::system_bytes(size_t bytes) const {
  const int64_t after = stats_.reserved + static_cast<int64_t>(bytes);
  if (cap_ > 0 && after > cap_) return nullptr;
  static std::atomic<uintptr_t> next_dry{1 << 20};
  if (dry_) return reinterpret_cast<std::byte*>(next_dry.fetch_add(bytes));
  void* data = std::aligned_alloc(pinned_ ? kPage : kLine, bytes);
  return static_cast<std::byte*>(data);
}

std::shared_ptr<Memory> Pool::from_system(size_t bytes) {
  if (pinned_ && !free_.empty()) give_up_largest();
  std::byte* data = system_bytes(bytes);
  while (data == nullptr && !free_.empty()) {
    give_up_largest();
    data = system_bytes(bytes);
  }
  if (data == nullptr) return nullptr;
  ++stats_.system_allocations;
  stats_.reserved += static_cast<int64_t>(bytes);
  stats_.peak_reserved = std::max(stats_.peak_reserved, stats_.reserved);
  return std::make_shared<Memory>(data, bytes);
}

// Returns a free block to the system after its last use.
void Pool::give_up_largest() {
  const auto memory = free_.extract(std::prev(free_.end())).mapped();
  for (const Event& use : memory->uses) {
    if (!use.done()) const_cast<Stream*>(use.stream)->synchronize(use);
  }
  note(MemoryEvent::kGone, {memory->data, memory->capacity});
  if (!dry_) std::free(memory->data);
  stats_.reserved -= static_cast<int64_t>(memory->capacity);
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
void Pool::poison(const Memory& memory) const {
  if (!poison_ || dry_ || !idle(memory.uses)) return;
  std::fill_n(reinterpret_cast<uint16_t*>(memory.data),
              memory.capacity / sizeof(uint16_t), uint16_t{0x7fff});
}

Block Pool::allocate(size_t bytes, Tag tag, Stream* stream) {
  Block block{nullptr, pinned_ ? round_up(bytes, kPage) : size_class(bytes),
              tag};
  std::unique_lock lock(mutex_);
  const auto found = find(block.bytes, stream);
  block.memory = found == free_.end() ? from_system(block.bytes)
                                      : free_.extract(found).mapped();
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
  poison(memory);
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
  poison(memory);
  std::lock_guard lock(mutex_);
  count(block.tag, -static_cast<int64_t>(block.bytes));
  free_.emplace_hint(free_.lower_bound(memory.capacity), memory.capacity,
                     block.memory);
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
  while (!free_.empty()) give_up_largest();
}

}  // namespace tapeline
