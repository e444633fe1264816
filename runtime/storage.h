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
// Held by StoragePtr, whose count is atomic; everything else belongs to the
// thread that runs the tensor's device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "runtime/device.h"
#include "runtime/pool.h"
#include "runtime/stream.h"

namespace tapeline {

enum class Residency { kResident, kCopying, kHost, kLoading, kDropped };
std::string_view name_of(Residency residency);

class Storage;
using StoragePtr = std::shared_ptr<Storage>;

class Storage {
 public:
  Storage(Device& device, size_t bytes, Tag tag);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  Device& device() const { return *device_; }
  size_t bytes() const { return bytes_; }
  Tag tag() const { return tag_; }
  uint64_t id() const { return id_; }  // never reused within a process
  uint32_t version() const { return version_; }
  // A load that has finished is Resident.
  Residency residency() const;
  int leases() const { return leases_; }
  const Event& ready() const { return ready_; }
  void bump_version() { ++version_; }

  // Lease of the bytes for work on `stream`, which is made to wait for them.
  std::byte* acquire(Stream& stream, bool will_write = false);
  // The work issued under the lease ends at stream.record().
  void release(Stream& stream, bool wrote);

  // Resident -> Copying. False: the pinned pool refuses, nothing done.
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
  // Of the process: storages alive, the id of the one made next, and unplanned
  // reloads so far.
  static int64_t live() { return live_; }
  static uint64_t next_id() { return next_id_; }
  static int64_t demand_reloads() { return demand_reloads_; }

 private:
  bool loading() const { return ready_.stream == &device_->copy_in(); }
  void return_block();
  void return_slot(const Event& last_use);
  void refill();

  static inline std::atomic<int64_t> live_ = 0, demand_reloads_ = 0;
  static inline std::atomic<uint64_t> next_id_ = 1;

  Device* device_;
  size_t bytes_;
  Tag tag_;
  uint64_t id_;
  Block block_;  // on the device
  Block slot_;   // pinned, from the copy out on until the load
  std::function<StoragePtr()> refill_;
  Event ready_;     // after the last write or load
  Event last_use_;  // after every kernel so far
  Event copied_;    // after the last copy out
  uint32_t version_ = 0;
  int leases_ = 0;
  Residency residency_ = Residency::kResident;  // never kLoading
  bool strict_ = false;
};

}  // namespace tapeline
