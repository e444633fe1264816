// Storage: the unit of identity, versioning and residency of tensor bytes.
//
// Bytes are on the device (Resident), being copied out (Copying; still
// readable), only in pinned host memory (Host), being copied back (Loading), or
// gone because a recompute owns them (Dropped):
//
//   Resident -> Copying -> Host -> Loading -> Resident
//   Resident -> Dropped -> Resident
//
// A device address is valid only under a lease (access.h): acquire() makes the
// bytes resident and counts a lease, release() returns it. Bytes under a lease
// are not evicted. Acquiring Host bytes reloads them, counted in
// demand_reloads(), or fails under strict; acquiring Dropped bytes makes them
// again. A write cancels a copy out that is under way. `version` counts writes
// through access.h; moving bytes or making them again never changes it.
//
// Moves are ordered by events alone (edge.h names them), so that no step of
// them waits on the host or asks whether something is done: an evicted block
// returns to the pool with the event of its copy, and who gets it waits for
// that; a load starts after the last use of its block and after its copy out; a
// kernel starts after the load of what it reads; a pinned slot returns with the
// event of its load. Across streams a reader waits for the last writer, a
// writer also for the readers before it.
//
// Intrusively counted; the count is atomic, everything else belongs to the
// thread that runs the tensor's device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
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

class StoragePtr;

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
  void bump_version() { ++version_; }

  // Lease of the bytes for work on `stream`, which is made to wait for them.
  std::byte* acquire(Stream& stream, bool will_write = false);
  // The work issued under the lease ends at stream.record().
  void release(Stream& stream, bool wrote);

  // Resident -> Copying. False: the pinned pool's cap refuses, nothing done.
  bool copy_out();
  // Copying -> Host. False and nothing done while a lease is out, or where a
  // write has cancelled the copy.
  bool evict();
  // Host -> Loading; Copying -> Resident: bytes that are still there stay.
  void load();
  // Resident -> Dropped. `refill` makes a storage with the same bytes, whose
  // block this one takes over when they are wanted.
  void drop(std::function<StoragePtr()> refill);

  void set_strict(bool strict) { strict_ = strict; }
  static int64_t live();            // storages alive in the process
  static uint64_t next_id();        // of the storage made next
  static int64_t demand_reloads();  // unplanned reloads so far
  static int64_t refills();         // of dropped bytes so far

 private:
  friend class StoragePtr;
  ~Storage();
  bool on_device() const;
  void return_block();
  void return_slot(const Event& last_use);
  void refill();

  Device* device_;
  size_t bytes_;
  Block block_;
  Tag tag_;
  uint64_t id_;
  PinnedSlot* slot_ = nullptr;  // leased, with its generation then
  uint64_t generation_ = 0;
  std::function<StoragePtr()> refill_;
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
