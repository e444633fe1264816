// How a GPU makes both gradients of a norm over rows in one pass: a pure choice
// by shape, shared by rms_norm and layer_norm.
//
// A block walks tiles of rows, of which a ring holds some; those of short rows
// are held in registers instead. `lanes` threads share a row, and each of them
// has `held` packs of 16 bytes of it, the same columns in every row, of `each`
// rows of a tile; so a block ends with one row of sums for each parameter, its
// part. Rows that are not whole packs or too long have no such plan (parts =
// 0).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <ostream>

#include "kernels/kernel.h"

namespace tapeline {

struct NormPlan {
  int threads = 0, blocks = 0;  // of a block; blocks on a processor
  int lanes = 0, held = 0, each = 0;
  int tiles = 0;      // of the ring; 0: in registers
  int64_t parts = 0;  // blocks, and rows of partial sums

  int64_t rows() const { return int64_t{threads} / lanes * each; }  // of a tile
  bool operator==(const NormPlan&) const = default;
  friend std::ostream& operator<<(std::ostream& out, const NormPlan& p) {
    if (p.parts == 0) return out << "two passes";
    return out << p.parts << " parts of " << p.threads << " threads, "
               << p.lanes << " lanes a row, " << p.held << " packs a lane, "
               << p.each << " rows a lane, " << p.tiles << " tiles";
  }
};

// An H200's. It decides the order of a sum, so it does not follow the card.
inline constexpr int64_t kNormProcessors = 132;
inline constexpr int64_t kMostNormParts = 2 * kNormProcessors;

// For n rows of d elements that lie on 16 bytes, and so many sums a column.
inline NormPlan norm_plan(int64_t n, int64_t d, int64_t element_bytes,
                          int sums) {
  if (n == 0 || d == 0 || d * element_bytes % 16 != 0) return {};
  if (n > std::numeric_limits<int32_t>::max() / 2) return {};
  const int64_t packs = d * element_bytes / 16;
  // Of the shortest, registers hold this tile and the next. The longest keep
  // all of a processor's shared memory filled, one block with all its
  // registers; of those between two blocks take turns.
  constexpr NormPlan kPlans[] = {{256, 2, 16, 1, 4, 0},  {256, 2, 32, 1, 4, 0},
                                 {256, 2, 32, 2, 2, 3},  {512, 2, 128, 1, 1, 4},
                                 {512, 2, 256, 1, 1, 4}, {512, 2, 512, 1, 1, 4},
                                 {512, 1, 512, 2, 1, 6}};
  for (NormPlan plan : kPlans) {
    if (packs > plan.lanes * plan.held) continue;
    // Two sums a column do not leave the registers for the longest.
    if (sums > 1 && plan.threads == 512 && plan.held > 1) continue;
    // Each block takes the same number of tiles, or one less.
    const int64_t all = ceil_div(n, plan.rows());
    const int64_t rounds = ceil_div(all, plan.blocks * kNormProcessors);
    plan.parts = ceil_div(all, rounds);
    return plan;
  }
  return {};
}

}  // namespace tapeline
