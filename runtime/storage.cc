#include "runtime/storage.h"

#include <utility>

#include "runtime/check.h"
#include "runtime/edge.h"

namespace tapeline {

std::string_view name_of(Residency residency) {
  constexpr std::string_view kNames[] = {"Resident", "Copying", "Host",
                                         "Loading", "Dropped"};
  return kNames[static_cast<int>(residency)];
}

Storage::Storage(Device& device, size_t bytes, Tag tag)
    : device_(&device),
      bytes_(bytes),
      tag_(tag),
      id_(next_id_.fetch_add(1, std::memory_order_relaxed)),
      block_(device.pool().allocate(bytes, tag, &device.compute())),
      // The block may still be in use by earlier work of this stream.
      last_use_(device.compute().record()) {
  live_.fetch_add(1, std::memory_order_relaxed);
}

Storage::~Storage() {
  CHECK_EQ(leases_, 0) << "storage " << id_ << " freed while a kernel uses it";
  return_slot(copied_);
  return_block();
  live_.fetch_sub(1, std::memory_order_relaxed);
}

void Storage::return_block() {
  device_->pool().free(std::exchange(block_, {}), {last_use_, ready_, copied_});
}

void Storage::return_slot(const Event& last_use) {
  const Block slot = std::exchange(slot_, {});
  if (holds(Edge::kSlotIsLeased)) device_->pinned().free(slot, {last_use});
}

Residency Storage::residency() const {
  const bool loads =
      residency_ == Residency::kResident && loading() && !ready_.done();
  return loads ? Residency::kLoading : residency_;
}

std::byte* Storage::acquire(Stream& stream, bool will_write) {
  if (residency_ == Residency::kHost) {
    CHECK(!strict_) << "storage " << id_ << " was evicted and is used outside "
                    << "its plan";
    ++demand_reloads_;
    load();
  }
  if (residency_ == Residency::kDropped) refill();
  if (holds(Edge::kUseWaitsLoad) || !loading()) wait_for(stream, ready_);
  if (will_write) {
    wait_for(stream, last_use_);
    wait_for(stream, copied_);  // a cancelled copy reads, too
    if (residency_ == Residency::kCopying) load();
  }
  stream.access(block_.data, bytes_, will_write);
  ++leases_;
  return block_.data;
}

void Storage::release(Stream& stream, bool wrote) {
  CHECK_GT(leases_, 0);
  --leases_;
  stream.access(block_.data, bytes_, wrote);
  // One event stands for all uses so far.
  wait_for(stream, last_use_);
  last_use_ = stream.record();
  if (wrote) ready_ = last_use_;
}

bool Storage::copy_out() {
  CHECK(residency_ == Residency::kResident) << name_of(residency_);
  Stream& stream = device_->copy_out();
  slot_ = device_->pinned().allocate(bytes_, tag_, &stream);
  if (slot_.data == nullptr) return false;
  wait_for(stream, ready_);
  stream.copy(slot_.data, block_.data, bytes_);
  copied_ = stream.record();
  residency_ = Residency::kCopying;
  if (!holds(Edge::kSlotIsLeased)) device_->pinned().free(slot_, {});
  return true;
}

bool Storage::evict() {
  if (residency_ != Residency::kCopying || leases_ > 0) return false;
  device_->pool().note(MemoryEvent::kEvict, block_);
  return_block();
  residency_ = Residency::kHost;
  return true;
}

void Storage::load() {
  const Residency from = std::exchange(residency_, Residency::kResident);
  const bool resident = from == Residency::kCopying;
  if (resident && holds(Edge::kResidentIsNotLoaded))
    return return_slot(copied_);
  CHECK(resident || from == Residency::kHost) << name_of(from);
  CHECK(slot_.owned()) << "storage " << id_
                       << ": its pinned bytes were overwritten or may be";
  Stream& stream = device_->copy_in();
  if (!resident) {
    // The block is the compute stream's: the load follows what it last did.
    block_ = device_->pool().allocate(bytes_, tag_, &device_->compute());
    last_use_ = device_->compute().record();
    if (holds(Edge::kLoadWaitsBlock)) wait_for(stream, last_use_);
    if (holds(Edge::kLoadWaitsCopyOut)) wait_for(stream, copied_);
  }
  device_->pool().note(MemoryEvent::kLoad, block_);
  stream.copy(block_.data, slot_.data, bytes_);
  ready_ = stream.record();
  return_slot(ready_);
}

void Storage::drop(std::function<StoragePtr()> refill) {
  CHECK(residency_ == Residency::kResident) << name_of(residency_);
  CHECK_EQ(leases_, 0) << "storage " << id_ << " dropped while in use";
  device_->pool().note(MemoryEvent::kDrop, block_);
  return_block();
  refill_ = std::move(refill);
  residency_ = Residency::kDropped;
}

void Storage::refill() {
  CHECK(refill_ != nullptr) << "storage " << id_ << " was dropped for recompute"
                            << " and is used while that runs";
  const StoragePtr made = std::exchange(refill_, nullptr)();
  CHECK_EQ(made->bytes_, bytes_) << "a recompute made other bytes";
  CHECK(made.use_count() == 1 && made->block_.data != nullptr)
      << "a recompute kept the bytes it made";
  block_ = std::exchange(made->block_, {});
  device_->pool().note(MemoryEvent::kRefill, block_);
  ready_ = made->ready_;
  last_use_ = made->last_use_;
  copied_ = made->copied_;
  residency_ = Residency::kResident;
}

}  // namespace tapeline
