#include "runtime/storage.h"

#include "runtime/check.h"

namespace tapeline {
namespace {

std::atomic<uint64_t> next_id{1};
std::atomic<int64_t> live_storages{0};
std::atomic<int64_t> reloads{0};

}  // namespace

std::string_view name_of(Residency residency) {
  switch (residency) {
    case Residency::kResident: return "Resident";
    case Residency::kCopying: return "Copying";
    case Residency::kHost: return "Host";
    case Residency::kLoading: return "Loading";
    case Residency::kDropped: return "Dropped";
  }
  return "?";
}

Storage::Storage(Device& device, size_t bytes, Tag tag)
    : device_(&device),
      bytes_(bytes),
      block_(device.pool().allocate(bytes, tag, &device.compute())),
      tag_(tag),
      id_(next_id.fetch_add(1, std::memory_order_relaxed)) {
  live_storages.fetch_add(1, std::memory_order_relaxed);
}

Storage::~Storage() {
  CHECK_EQ(leases_, 0) << "storage " << id_ << " freed while a kernel uses it";
  device_->pool().free(block_, last_use_.stream, last_use_);
  live_storages.fetch_sub(1, std::memory_order_relaxed);
}

int64_t Storage::live() { return live_storages.load(); }
int64_t Storage::demand_reloads() { return reloads.load(); }

std::byte* Storage::acquire(Stream& stream) {
  if (residency_ == Residency::kHost) {
    CHECK(!strict_) << "storage " << id_ << " was evicted and is used outside "
                    << "its plan";
    reloads.fetch_add(1);
    begin_load(stream);
  }
  CHECK(residency_ != Residency::kDropped)
      << "storage " << id_ << " was dropped for recompute and is used before "
      << "it was refilled";
  if (residency_ == Residency::kLoading && ready_.done()) {
    residency_ = Residency::kResident;
  }
  if (!ready_.done() && ready_.stream != &stream) stream.wait(ready_);
  ++leases_;
  return block_.data;
}

void Storage::release(Stream& stream, bool wrote) {
  CHECK_GT(leases_, 0);
  --leases_;
  last_use_ = stream.record();
  if (wrote) ready_ = last_use_;
}

void Storage::begin_copy_out(Stream& stream, std::byte* host) {
  CHECK(residency_ == Residency::kResident) << name_of(residency_);
  stream.wait(ready_);
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
  CHECK(residency_ == Residency::kCopying) << name_of(residency_);
  if (!copied_.done() || leases_ > 0) return false;
  device_->pool().free(block_, last_use_.stream, last_use_);
  block_.data = nullptr;
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
  CHECK(residency_ == Residency::kResident) << name_of(residency_);
  CHECK_EQ(leases_, 0) << "storage " << id_ << " dropped while in use";
  device_->pool().free(block_, last_use_.stream, last_use_);
  block_.data = nullptr;
  residency_ = Residency::kDropped;
}

void Storage::refill() {
  CHECK(residency_ == Residency::kDropped) << name_of(residency_);
  block_ = device_->pool().allocate(bytes_, tag_, &device_->compute());
  residency_ = Residency::kResident;
}

}  // namespace tapeline
