// Which way cross_entropy_forward_backward takes on CUDA: pure, so that tests
// can print it.
#pragma once

#include <cstdint>
#include <ostream>

#include "kernels/kernel.h"

namespace tapeline::cuda {

// A cluster of kRowBlocks blocks has a row, whose packs its threads take in
// turn and keep, all but one in shared memory.
inline constexpr int kRowBlocks = 4;
inline constexpr int kBlockThreads = 512;
inline constexpr int kRowThreads = kRowBlocks * kBlockThreads;
inline constexpr int kBlocksAtOnce = 3;  // on a processor

// Of shared memory, for a block whose threads have so many packs, with the sums
// of the row's warps and the KB that CUDA takes for itself.
inline constexpr int kWarpSumBytes = kRowThreads / 32 * 8;
constexpr int pack_bytes(int64_t packs) {
  return static_cast<int>(packs - 1) * kBlockThreads * 16;
}
constexpr int block_bytes(int64_t packs) {
  return pack_bytes(packs) + kWarpSumBytes + 1024;
}
// As many as leave room for kBlocksAtOnce in a processor's 228 KB.
inline constexpr int kMostPacks = 10;
static_assert(kBlocksAtOnce * block_bytes(kMostPacks) <= 228 << 10);
static_assert(kBlocksAtOnce * block_bytes(kMostPacks + 1) > 228 << 10);

struct CrossEntropyPlan {
  int64_t packs = 0;  // of a thread; 0: two kernels, each of which reads a row

  friend bool operator==(const CrossEntropyPlan&,
                         const CrossEntropyPlan&) = default;
  friend std::ostream& operator<<(std::ostream& out,
                                  const CrossEntropyPlan& p) {
    if (p.packs == 0) return out << "forward, then backward";
    return out << "clusters of " << kRowBlocks << " blocks, " << p.packs
               << " packs a thread";
  }
};

// `whole`: rows are whole packs on 16 bytes. Clusters with less to do would
// wait for each other more than for memory.
inline CrossEntropyPlan cross_entropy_plan(bool bf16, bool whole,
                                           int64_t vocabulary) {
  constexpr int64_t kPackElements = 8, kFewest = 6;
  if (!bf16 || !whole) return {};
  const int64_t packs = ceil_div(vocabulary, kRowThreads * kPackElements);
  if (packs < kFewest || packs > kMostPacks) return {};
  return {packs};
}

}  // namespace tapeline::cuda
