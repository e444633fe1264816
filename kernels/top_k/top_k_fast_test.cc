#include "kernels/top_k/top_k_fast.h"

#include <sstream>

#include "gtest/gtest.h"

namespace tapeline::cuda {
namespace {

TEST(TopKPlan, RowsOfScoresTakeTheRadixKernel) {
  for (int64_t keys : {1, 2048, 32768, 131072}) {
    for (int k : {1, 64, 1024, 2048}) {
      EXPECT_TRUE(top_k_plan(true, keys, k).radix) << keys << " " << k;
    }
  }
}

TEST(TopKPlan, F64AndLongRowsArePlain) {
  EXPECT_FALSE(top_k_plan(false, 32768, 2048).radix);
  EXPECT_TRUE(top_k_plan(true, 1 << 20, 2048).radix);
  EXPECT_FALSE(top_k_plan(true, (1 << 20) + 1, 2048).radix);
  // A bitmap of 128 KiB beside 96 KiB of candidates.
  EXPECT_FALSE(top_k_plan(true, 1 << 20, 2049).radix);
}

TEST(TopKPlan, CapacityFollowsFromK) {
  EXPECT_EQ(top_k_plan(true, 32768, 1).capacity, 3072);
  EXPECT_EQ(top_k_plan(true, 32768, 1024).capacity, 3072);
  EXPECT_EQ(top_k_plan(true, 32768, 1025).capacity, 6144);
  EXPECT_EQ(top_k_plan(true, 32768, 2048).capacity, 6144);
  EXPECT_EQ(top_k_plan(true, 32768, 2049).capacity, 12288);
}

TEST(TopKPlan, BytesCoverCandidatesHistogramAndBitmap) {
  for (int64_t keys : {1, 31, 32, 33, 131072}) {
    const TopKPlan p = top_k_plan(true, keys, 2048);
    EXPECT_EQ(p.shared_bytes, top_k_shared_bytes(keys, 6144));
    EXPECT_GE(static_cast<int64_t>(p.shared_bytes),
              6144 * 8 + 2048 * 4 + keys / 8);
    EXPECT_LE(p.shared_bytes, size_t{200} << 10);
    EXPECT_EQ(p.shared_bytes % 4, 0u);
  }
}

TEST(TopKPlan, Prints) {
  std::ostringstream out;
  out << top_k_plan(true, 32, 8) << "; " << top_k_plan(false, 32, 8);
  EXPECT_EQ(out.str(),
            "radix: 512 threads, 3072 candidates, 32776 bytes; plain");
}

}  // namespace
}  // namespace tapeline::cuda
