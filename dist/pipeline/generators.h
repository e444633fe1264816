// Pipeline schedules by name. Pure functions of four numbers.
//
//   gpipe         all forward passes, then all backward passes
//   1f1b          warm-up of p-r-1 forward passes, then one of each in turn
//                 (Harlap et al. 2018; Narayanan et al. 2021, 2104.04473)
//   eager_1f1b    warm-up of 2(p-r-1): hides latency for up to 2p-1 activations
//   interleaved   v stages a rank, micro-batches in groups (2104.04473)
//   looped_bfs    v stages a rank, each over all micro-batches (2211.05953)
//   zb1p          1f1b with I and W apart and W late, no more memory; v >= 1
//   zb_h2         the same with a warm-up of 2(p-r-1): no idle time inside a
//                 rank at F = I = W (Qi et al. 2023, 2401.10241)
//   zbv           two stages a rank, down and up; at most p activations
//   v_half v_min  the same with at most p/2+1 and p/3+2 activations
//                 (Qi et al. 2024, 2405.15362)
//   dualpipev     two stages a rank, forward and backward passes overlapped
//                 (DeepSeek-AI 2025)
//
// p ranks, v chunks (stages a rank), m micro-batches, r rank. Every stage runs
// its backward passes in ascending order of micro-batches, so sums of gradients
// are added in one order under any of them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "dist/pipeline/schedule.h"

namespace tapeline {

struct ScheduleSize {
  int64_t ranks = 1, chunks = 1, micro_batches = 1;
  // Micro-batches that pass a rank's stages together, of interleaved and zb1p;
  // 0: as many as ranks.
  int64_t group = 0;
};

// Stages times micro-batches are at most so many.
inline constexpr int64_t kMaxPasses = int64_t{1} << 21;

const std::vector<std::string>& schedule_names();
// The chunks of a schedule that has no choice, otherwise 1.
int default_chunks(std::string_view name);

// InvalidArgument for an unknown name, numbers out of range, and sizes that a
// schedule does not have: gpipe, 1f1b, eager_1f1b and zb_h2 have one chunk;
// zbv, v_half, v_min and dualpipev two; dualpipev at least 2p micro-batches.
absl::StatusOr<Schedule> make_schedule(std::string_view name,
                                       const ScheduleSize& size);

}  // namespace tapeline
