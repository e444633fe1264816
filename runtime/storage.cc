#include "runtime/storage.h"

#include "runtime/check.h"
#include "runtime/edge.h"

namespace tapeline {
namespace {

std::atomic<uint64_t> next_storage_id{1};
std::atomic<int64_t> live_storages{0};
std::atomic<int64_t> reloads{0}, refilled{0};

void wait_for(Stream& stream, const Event& event) {
  if (event.stream != &stream && !event.done()) stream.wait(event);
}

}  // namespace

std::string_view name_of(Residency residency) {
  switch (residency) {
    case Residency::kResident:
      return "Resident";
    case Residency::kCopying:
      return "Copying";
    case Residency::kHost:
      return "Host";
    case Residency::kLoading:
      return "Loading";
    case Residency::kDropped:
      return "Dropped";
  }
  return "?";
}

Storage::Storage(Device& device, size_t bytes, Tag tag)
    : device_(&device),
      bytes_(bytes),
      block_(device.pool().allocate(bytes, tag, &device.compute())),
      tag_(tag),
      id_(next_storage_id.fetch_add(1, std::memory_order_relaxed)),
      // The block may still be in use by earlier work of this stream.
      last_use_(device.compute().record()) {
  live_storages.fetch_add(1, std::memory_order_relaxed);
}

Storage::~Storage() {
  CHECK_EQ(leases_, 0) << "storage " << id_ << " freed while a kernel uses it";
  return_slot(copied_);
  return_block();
  live_storages.fetch_sub(1, std::memory_order_relaxed);
}

uint64_t Storage::next_id() {
  return next_storage_id.load(std::memory_order_relaxed);
}
int64_t Storage::live() { return live_storages.load(); }
int64_t Storage::demand_reloads() { return reloads.load(); }
int64_t Storage::refills() { return refilled.load(); }

void Storage::return_block() {
  device_->pool().free(block_, {last_use_, ready_, copied_});
  block_.data = nullptr;
}

void Storage::return_slot(const Event& last_use) {
  PinnedSlot* slot = std::exchange(slot_, nullptr);
  if (slot == nullptr || !holds(Edge::kSlotIsLeased)) return;
  device_->pinned().give_back(slot, bytes_, last_use);
}

std::byte* Storage::acquire(Stream& stream, bool will_write) {
  if (residency_ == Residency::kHost) {
    CHECK(!strict_) << "storage " << id_ << " was evicted and is used outside "
                    << "its plan";
    reloads.fetch_add(1);
    load();
  }
  if (residency_ == Residency::kDropped) refill();
  residency_ = residency();
  if (holds(Edge::kUseWaitsLoad) || ready_.stream != &device_->copy_in()) {
    wait_for(stream, ready_);
  }
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

// What is loaded is as good as resident to all that waits for it.
bool Storage::on_device() const {
  return residency_ == Residency::kResident ||
         residency_ == Residency::kLoading;
}

bool Storage::copy_out() {
  CHECK(on_device()) << name_of(residency_);
  slot_ = device_->pinned().lease(bytes_);
  if (slot_ == nullptr) return false;
  generation_ = slot_->generation;
  Stream& stream = device_->copy_out();
  if (holds(Edge::kSlotWaitsLoad)) wait_for(stream, slot_->last_use);
  wait_for(stream, ready_);
  stream.copy(slot_->data, block_.data, bytes_);
  copied_ = stream.record();
  residency_ = Residency::kCopying;
  if (!holds(Edge::kSlotIsLeased)) {
    device_->pinned().give_back(slot_, bytes_, {});
  }
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
  const bool resident = residency_ == Residency::kCopying;
  if (resident && holds(Edge::kResidentIsNotLoaded)) {
    return_slot(copied_);
    residency_ = Residency::kResident;
    return;
  }
  CHECK(resident || residency_ == Residency::kHost) << name_of(residency_);
  CHECK_EQ(slot_->generation, generation_)
      << "storage " << id_ << ": its pinned bytes were overwritten";
  Stream& stream = device_->copy_in();
  if (!resident) {
    // The block is the compute stream's: the load follows what it last did.
    block_ = device_->pool().allocate(bytes_, tag_, &device_->compute());
    last_use_ = device_->compute().record();
    if (holds(Edge::kLoadWaitsBlock)) wait_for(stream, last_use_);
    if (holds(Edge::kLoadWaitsCopyOut)) wait_for(stream, copied_);
  }
  device_->pool().note(MemoryEvent::kLoad, block_);
  stream.copy(block_.data, slot_->data, bytes_);
  ready_ = stream.record();
  residency_ = Residency::kLoading;
  return_slot(ready_);
}

void Storage::drop(std::function<StoragePtr()> refill) {
  CHECK(on_device()) << name_of(residency_);
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
  CHECK(made.unique() && made->block_.data != nullptr)
      << "a recompute kept the bytes it made";
  refilled.fetch_add(1);
  block_ = std::exchange(made->block_, {});
  device_->pool().note(MemoryEvent::kRefill, block_);
  ready_ = made->ready_;
  last_use_ = made->last_use_;
  copied_ = made->copied_;
  residency_ = Residency::kResident;
}

}  // namespace tapeline
