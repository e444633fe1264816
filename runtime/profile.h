// Where a step's time goes: named ranges, summed per thread, and as a trace.
//
//   ProfileRange range(Range::kMatmul);   // until the end of the scope
//
// Off by default: a range then costs one relaxed load. Ranges nest; a row's
// `self` time is its `total` without the ranges inside it, so the self times of
// a thread add up to its measured time. A range inside one of the same name
// counts as a call but adds nothing to `total`.
// Every range name of the project is listed here. Times are steady-clock
// nanoseconds. Ranges may run on any thread; report, trace and reset see the
// ranges that have ended. In a CUDA build every range is one of NVTX as well.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace tapeline {

// Of the steady clock, from an arbitrary beginning.
int64_t now_ns();
inline double now_seconds() { return 1e-9 * static_cast<double>(now_ns()); }

enum class Range : uint8_t {
  // Phases of a run.
  kStep,
  kData,
  kForward,
  kBackward,
  kBackwardInputs,
  kBackwardWeights,
  kReplay,
  kOptimizer,
  kEval,
  kSample,
  kSnapshot,
  kExport,
  // Operations.
  kAdamw,
  kAttention,
  kAuxLoss,
  kCombine,
  kCrossEntropy,
  kDispatch,
  kElementwise,
  kEmbedding,
  kGradNorm,
  kGroupedMatmul,
  kIndexer,
  kIndexerLoss,
  kMatmul,
  kMuon,
  kRmsNorm,
  kRope,
  kRoute,
  kSoftmax,
  kSparseAttention,
  kSwiglu,
  kTopK,
  // Moving bytes.
  kCopy,
  kOffload,
  kReload,
  kSend,
  kReceive,
  kAllReduce,
  kAllToAll,
  kWait,
};
inline constexpr int kRanges = static_cast<int>(Range::kWait) + 1;
std::string_view name_of(Range range);

enum class ProfileMode : uint8_t {
  kOff,
  kCount,  // sums only
  kTrace,  // sums, and every range as an event
};
void set_profile(ProfileMode mode);
ProfileMode profile_mode();

struct ProfileRow {
  Range range;
  int64_t count = 0;
  int64_t total_ns = 0;
  int64_t self_ns = 0;
};
// Sums over threads since the last reset, largest self time first; ranges that
// never ran are left out.
std::vector<ProfileRow> profile_report();
// The report as aligned text, a line per row.
std::string profile_table();
// Forgets sums and events.
void reset_profile();

// The events as Chrome Trace Event JSON (chrome://tracing, Perfetto): one
// complete event per range, microseconds, pid = rank, tid = thread in order of
// first use. At most a million events a thread are kept; the rest are counted
// in "dropped".
absl::Status write_chrome_trace(const std::string& path, int rank = 0);

namespace internal {
extern std::atomic<ProfileMode> current_profile_mode;
}

class ProfileRange {
 public:
  explicit ProfileRange(Range range) {
    if (internal::current_profile_mode.load(std::memory_order_relaxed) !=
        ProfileMode::kOff) {
      begin(range);
    }
  }
  ~ProfileRange() {
    if (begin_ns_ >= 0) end();
  }
  ProfileRange(const ProfileRange&) = delete;
  ProfileRange& operator=(const ProfileRange&) = delete;

 private:
  void begin(Range range);
  void end();

  ProfileRange* parent_ = nullptr;
  int64_t begin_ns_ = -1;  // -1: not measured
  int64_t inner_ns_ = 0;   // spent in ranges inside this one
  Range range_{};
};

}  // namespace tapeline
