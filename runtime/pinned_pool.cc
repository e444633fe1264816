#include "runtime/pinned_pool.h"

#include <algorithm>

#include "runtime/check.h"
#include "runtime/pool.h"

namespace tapeline {
namespace {

constexpr size_t kPage = 4096;

}  // namespace

PinnedPool::~PinnedPool() {
  for (const auto& slot : slots_) {
    tell(Region::kGone, *slot);
    internal::system_free(slot->data, dry_);
  }
}

PinnedSlot* PinnedPool::lease(size_t bytes) {
  PinnedSlot* best = nullptr;
  for (const auto& slot : slots_) {
    if (slot->leased || slot->bytes < bytes) continue;
    if (best == nullptr || slot->bytes < best->bytes) best = slot.get();
  }
  if (best == nullptr) {
    const size_t size =
        (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
    make_room(size);
    const auto after = stats_.bytes + static_cast<int64_t>(size);
    std::byte* data = cap_ > 0 && after > cap_
                          ? nullptr
                          : internal::system_allocate(kPage, size, dry_);
    if (data == nullptr) {
      ++stats_.refusals;
      return nullptr;
    }
    ++stats_.system_allocations;
    stats_.bytes = after;
    stats_.peak_bytes = std::max(stats_.peak_bytes, after);
    slots_.push_back(std::make_unique<PinnedSlot>());
    best = slots_.back().get();
    best->data = data;
    best->bytes = size;
  }
  best->leased = true;
  tell(Region::kOwned, *best);
  ++best->generation;
  stats_.leased_bytes += static_cast<int64_t>(best->bytes);
  stats_.requested_bytes += static_cast<int64_t>(bytes);
  return best;
}

// Gives up the largest free slot, which is too small, and under a cap as many
// as it takes. Copies that still use one are waited for: rare, and what is
// given up does not depend on their speed.
void PinnedPool::make_room(size_t bytes) {
  bool first = true;
  const auto full = [&] {
    return cap_ > 0 && stats_.bytes + static_cast<int64_t>(bytes) > cap_;
  };
  while (first || full()) {
    first = false;
    auto largest = slots_.end();
    for (auto at = slots_.begin(); at != slots_.end(); ++at) {
      if ((*at)->leased) continue;
      if (largest == slots_.end() || (*at)->bytes > (*largest)->bytes) {
        largest = at;
      }
    }
    if (largest == slots_.end()) return;
    if (const Event& use = (*largest)->last_use; !use.done()) {
      const_cast<Stream*>(use.stream)->synchronize(use);
    }
    stats_.bytes -= static_cast<int64_t>((*largest)->bytes);
    tell(Region::kGone, **largest);
    internal::system_free((*largest)->data, dry_);
    slots_.erase(largest);
  }
}

void PinnedPool::give_back(PinnedSlot* slot, size_t bytes,
                           const Event& last_use) {
  CHECK(slot->leased) << "a pinned slot is given back twice";
  slot->leased = false;
  tell(Region::kFree, *slot);
  slot->last_use = last_use;
  stats_.leased_bytes -= static_cast<int64_t>(slot->bytes);
  stats_.requested_bytes -= static_cast<int64_t>(bytes);
}

}  // namespace tapeline
