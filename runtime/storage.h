// Storage: the unit of identity, versioning and residency of tensor bytes.
//
// Bytes are on the device (Resident), being copied out (Copying; still
// readable), only in host memory (Host), being copied back (Loading), or gone
// because a recompute owns them (Dropped):
//
//   Resident -> Copying -> Host -> Loading -> Resident      Resident -> Dropped
//
// A device address is valid only under a lease (access.h): acquire() makes the
// bytes resident and counts a lease, release() returns it. Bytes are evicted
// only when the copy out is done and no lease is out. Acquiring Host bytes
// reloads them, counted in demand_reloads(), or fails under strict; acquiring
// Dropped bytes fails. A write cancels a copy out that is under way. `version`
// counts writes through access.h; moving bytes never changes it. The host
// buffer belongs to whoever began the copy and must live until the storage is
// resident again or dropped, and until copied() is done.
//
// Across streams: a reader waits for the last writer, a writer also for the
// readers before it, and a block returns to the pool with the event that ends
// its last use, whether by a kernel or by a copy.
//
// Intrusively counted; the count is atomic, everything else belongs to the
// thread that runs the tensor's device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "runtime/device.h"
#include "runtime/pool.h"
#include "runtime/stream.h"

namespace tapeline {

enum class Residency : uint8_t {
  kResident,
  kCopying,
  kHost,
  kLoading,
  kDropped
};
std::string_view name_of(Residency residency);

class Storage {
 public:
  Storage(Device& device, size_t bytes, Tag tag);
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  Device& device() const { return *device_; }
  size_t bytes() const { return bytes_; }
  Tag tag() const { return tag_; }
  uint64_t id() const { return id_; }  // never reused within a process
  uint32_t version() const { return version_; }
  // A load that has finished is Resident.
  Residency residency() const {
    return residency_ == Residency::kLoading && ready_.done()
               ? Residency::kResident
               : residency_;
  }
  int leases() const { return leases_; }
  const Event& ready() const { return ready_; }
  const Event& last_use() const { return last_use_; }
  const Event& copied() const { return copied_; }  // of the last copy out
  void bump_version() { ++version_; }

  // Lease of the bytes for work on `stream`, which is made to wait for them.
  std::byte* acquire(Stream& stream, bool will_write = false);
  // The work issued under the lease ends at stream.record().
  void release(Stream& stream, bool wrote);

  // Resident -> Copying: copies the bytes to `host` on `stream`.
  void begin_copy_out(Stream& stream, std::byte* host);
  // Copying -> Resident: the copy is ignored (the bytes were wanted again).
  void cancel_copy_out();
  // Copying -> Host when the copy is done and no lease is out; else false, and
  // false where a write has cancelled the copy.
  bool try_evict();
  // Host -> Loading: allocates device bytes and copies them back on `stream`.
  void begin_load(Stream& stream);
  // Resident -> Dropped, Dropped -> Resident with unwritten bytes.
  void drop();
  void refill();

  void set_strict(bool strict) { strict_ = strict; }
  static int64_t live();            // storages alive in the process
  static uint64_t next_id();        // of the storage made next
  static int64_t demand_reloads();  // unplanned reloads so far

 private:
  friend class StoragePtr;
  ~Storage();
  void return_block();

  Device* device_;
  size_t bytes_;
  Block block_;
  Tag tag_;
  uint64_t id_;
  std::byte* host_ = nullptr;
  Event ready_, last_use_, copied_;
  std::atomic<uint32_t> references_{0};
  uint32_t version_ = 0;
  int leases_ = 0;
  Residency residency_ = Residency::kResident;
  bool strict_ = false;
};

// Counted pointer to a Storage.
class StoragePtr {
 public:
  StoragePtr() = default;
  explicit StoragePtr(Storage* storage) : storage_(storage) { retain(); }
  StoragePtr(const StoragePtr& other) : storage_(other.storage_) { retain(); }
  StoragePtr(StoragePtr&& other) noexcept
      : storage_(std::exchange(other.storage_, nullptr)) {}
  StoragePtr& operator=(StoragePtr other) noexcept {
    std::swap(storage_, other.storage_);
    return *this;
  }
  ~StoragePtr() {
    if (storage_ != nullptr && storage_->references_.fetch_sub(1) == 1) {
      delete storage_;
    }
  }

  Storage* get() const { return storage_; }
  Storage* operator->() const { return storage_; }
  Storage& operator*() const { return *storage_; }
  explicit operator bool() const { return storage_ != nullptr; }
  bool unique() const { return storage_->references_.load() == 1; }
  friend bool operator==(const StoragePtr& a, const StoragePtr& b) {
    return a.storage_ == b.storage_;
  }

 private:
  void retain() {
    if (storage_ != nullptr) storage_->references_.fetch_add(1);
  }
  Storage* storage_ = nullptr;
};

}  // namespace tapeline
