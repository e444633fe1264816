// A device for tests on which nothing happens before it must: three streams
// whose work completes when the test says so, over real memory, and a checker
// that knows what every operation touches (happens_before.h).
//
// Kernels are real CPU kernels, executed by the calling thread when they are
// issued; the compute stream does not admit to it. Copies move their bytes
// when they run: at the latest when the compute stream waits for them, since
// its next kernel executes at once. That an operation ran and that the host is
// told so are two things; told, it may leave out a wait.
//
// Freed memory is poisoned once the host knows that it is idle. Every use of a
// storage, every copy, every block and pinned slot is declared to the checker;
// races() must be 0 at the end of a test. The hooks of the pools are taken. One
// thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "runtime/device.h"
#include "runtime/happens_before.h"
#include "runtime/stream.h"

namespace tapeline {

enum class Timing : uint8_t {
  kLate,    // copies run when waited for; the host is told when it blocks
  kSoon,    // everything runs when it is issued, and the host is told
  kRandom,  // at every call some stream runs, or tells, a few operations
};

class CheckedStream;

// What the streams of one device share.
struct FakeWorld {
  HappensBefore checker;
  Timing timing = Timing::kLate;
  std::mt19937_64 random;
  std::vector<CheckedStream*> streams;

  // Called at every call of every stream.
  void step();
  // The hook of the pools.
  void see(const char* kind, MemoryEvent event, const Block& block);
};

class CheckedStream : public Stream {
 public:
  struct Counts {
    int64_t copies = 0, bytes = 0;  // issued
    int64_t uses = 0;               // of a storage, by kernels
    int64_t waits = 0, records = 0;
    int64_t synchronizations = 0;  // the host blocked

    Counts& operator+=(const Counts& other);
  };

  // An eager one runs everything when it is issued, and what it waits for.
  CheckedStream(std::string name, FakeWorld& world, bool eager);

  void access(const void* data, size_t bytes, bool write) override;
  void copy(void* to, const void* from, size_t bytes) override;
  Event record() override;
  void wait(const Event& event) override;
  void synchronize(const Event& event) override;
  // Asking for one event orders nothing after what came later, even if that is
  // done as well.
  bool done(uint64_t sequence) const override;
  uint64_t completed() const override;

  // Runs and tells up to `count` operations; stops at a wait whose event the
  // host has not been told of. Returns how many.
  int advance(int count = 1);
  // Operations that the host has not been told of.
  int pending() const { return static_cast<int>(queue_.size()); }
  int64_t bytes_copied() const { return bytes_copied_; }
  const Counts& counts() const { return counts_; }

 private:
  friend struct FakeWorld;
  struct Operation {
    void* to = nullptr;
    const void* from = nullptr;
    size_t bytes = 0;
    Event wait;
  };
  CheckedStream& peer(const Event& event) const;
  void issue(const Operation& operation, uint64_t sequence);
  void run(uint64_t sequence);
  void leave(const std::byte* data, size_t bytes);
  void complete(uint64_t sequence);

  FakeWorld& world_;
  const int number_;  // at the checker
  const bool eager_;
  std::deque<Operation> queue_;  // from completed_ on
  uint64_t issued_ = 0, ran_ = 0, completed_ = 0;
  int64_t bytes_copied_ = 0;
  Counts counts_;
};

class FakeDevice {
 public:
  explicit FakeDevice(Timing timing = Timing::kLate, uint64_t seed = 0,
                      int threads = 1);
  FakeDevice(const FakeDevice&) = delete;
  FakeDevice& operator=(const FakeDevice&) = delete;

  Device& device() { return device_; }
  CheckedStream& compute() { return *world_.streams[0]; }
  CheckedStream& copy_out() { return *world_.streams[1]; }
  CheckedStream& copy_in() { return *world_.streams[2]; }
  HappensBefore& checker() { return world_.checker; }

  void set_timing(Timing timing, uint64_t seed = 0);
  // Everything issued so far runs, and the host is told.
  void finish();

  // Races, and accesses to what nobody owns.
  int64_t races() const;
  // What they were, and what each stream did.
  std::string report() const;
  CheckedStream::Counts counts() const;  // of all streams

 private:
  static DeviceStreams make_streams(FakeWorld& world);

  FakeWorld world_;  // outlives the device, whose pools report to it
  Device device_;
};

}  // namespace tapeline
