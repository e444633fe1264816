#include "runtime/storage.h"

#include "runtime/check.h"

namespace tapeline {
namespace {

std::atomic<uint64_t> next_storage_id{1};
std::atomic<int64_t> live_storages{0};
std::atomic<int64_t> reloads{0};

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
  return_block();
  live_storages.fetch_sub(1, std::memory_order_relaxed);
}

uint64_t Storage::next_id() {
  return next_storage_id.load(std::memory_order_relaxed);
}
int64_t Storage::live() { return live_storages.load(); }
int64_t Storage::demand_reloads() { return reloads.load(); }

void Storage::return_block() {
  // Kernels, a copy out and a load may each still use the block. One of them
  // is named to the pool; several are joined on the compute stream.
  Event last = last_use_;
  for (const Event& event : {ready_, copied_}) {
    if (event.done()) continue;
    if (last.done() || last.stream == event.stream) {
      const bool later = last.done() || event.sequence > last.sequence;
      if (later) last = event;
    } else {
      Stream& compute = device_->compute();
      wait_for(compute, last);
      wait_for(compute, event);
      last = compute.record();
    }
  }
  device_->pool().free(block_, last.stream, last);
  block_.data = nullptr;
}

std::byte* Storage::acquire(Stream& stream, bool will_write) {
  if (residency_ == Residency::kHost) {
    CHECK(!strict_) << "storage " << id_ << " was evicted and is used outside "
                    << "its plan";
    reloads.fetch_add(1);
    begin_load(stream);
  }
  CHECK(residency_ != Residency::kDropped)
      << "storage " << id_ << " was dropped for recompute and is used before "
      << "it was refilled";
  residency_ = residency();
  wait_for(stream, ready_);
  if (will_write) {
    wait_for(stream, last_use_);
    if (residency_ == Residency::kCopying) cancel_copy_out();
  }
  ++leases_;
  return block_.data;
}

void Storage::release(Stream& stream, bool wrote) {
  CHECK_GT(leases_, 0);
  --leases_;
  // One event stands for all uses so far.
  wait_for(stream, last_use_);
  last_use_ = stream.record();
  if (wrote) ready_ = last_use_;
}

void Storage::begin_copy_out(Stream& stream, std::byte* host) {
  CHECK(residency() == Residency::kResident) << name_of(residency_);
  wait_for(stream, ready_);
  stream.copy(host, block_.data, bytes_);
  copied_ = stream.record();
  host_ = host;
  residency_ = Residency::kCopying;
}

void Storage::cancel_copy_out() {
  CHECK(residency_ == Residency::kCopying) << name_of(residency_);
  residency_ = Residency::kResident;
}

bool Storage::try_evict() {
  if (residency_ != Residency::kCopying) return false;
  if (!copied_.done() || leases_ > 0) return false;
  return_block();
  residency_ = Residency::kHost;
  return true;
}

void Storage::begin_load(Stream& stream) {
  CHECK(residency_ == Residency::kHost) << name_of(residency_);
  // The block belongs to the compute stream's order; the copy follows it.
  block_ = device_->pool().allocate(bytes_, tag_, &device_->compute());
  stream.wait(device_->compute().record());
  stream.wait(copied_);
  stream.copy(block_.data, host_, bytes_);
  ready_ = stream.record();
  residency_ = Residency::kLoading;
}

void Storage::drop() {
  CHECK(residency() == Residency::kResident) << name_of(residency_);
  CHECK_EQ(leases_, 0) << "storage " << id_ << " dropped while in use";
  return_block();
  residency_ = Residency::kDropped;
}

void Storage::refill() {
  CHECK(residency_ == Residency::kDropped) << name_of(residency_);
  block_ = device_->pool().allocate(bytes_, tag_, &device_->compute());
  last_use_ = device_->compute().record();
  residency_ = Residency::kResident;
}

}  // namespace tapeline
