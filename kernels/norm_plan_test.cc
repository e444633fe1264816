#include "kernels/norm_plan.h"

#include <sstream>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

constexpr int64_t kBf16 = 2, kF32 = 4;

TEST(NormPlan, ModelsGetOnePass) {
  EXPECT_EQ(norm_plan(16384, 7168, kBf16, 1),
            (NormPlan{512, 1, 512, 2, 1, 6, 132}));
  EXPECT_EQ(norm_plan(8192, 6144, kBf16, 1),
            (NormPlan{512, 1, 512, 2, 1, 6, 131}));
  EXPECT_EQ(norm_plan(32768, 2048, kBf16, 1),
            (NormPlan{512, 2, 256, 1, 1, 4, 261}));
  EXPECT_EQ(norm_plan(65536, 128, kBf16, 2),
            (NormPlan{256, 2, 16, 1, 4, 0, 256}));
}

TEST(NormPlan, FewRowsAreFewParts) {
  EXPECT_EQ(norm_plan(1, 7168, kBf16, 1).parts, 1);
  EXPECT_EQ(norm_plan(128, 128, kBf16, 1).parts, 2);
  EXPECT_EQ(norm_plan(129, 128, kBf16, 1).parts, 3);
  EXPECT_EQ(norm_plan(0, 128, kBf16, 1).parts, 0);
}

// Every pack has a lane and a place in a register, the blocks of a processor
// fit into its shared memory, and no block takes two tiles more than another.
TEST(NormPlan, CoversRowsUpToItsLongest) {
  for (int sums : {1, 2}) {
    const int64_t longest = 16384 / sums;
    for (int64_t bytes = 16; bytes <= longest; bytes += 16) {
      const NormPlan plan = norm_plan(100003, bytes / kF32, kF32, sums);
      ASSERT_GT(plan.parts, 0) << bytes;
      EXPECT_GE(int64_t{plan.lanes} * plan.held * 16, bytes);
      EXPECT_LE(2 * bytes * plan.rows() * plan.tiles * plan.blocks, 200 << 10)
          << bytes << ": " << plan;
      const int64_t tiles = ceil_div(100003, plan.rows());
      EXPECT_LE(plan.parts, kMostNormParts);
      EXPECT_EQ(ceil_div(tiles, plan.parts),
                ceil_div(tiles, kNormProcessors * plan.blocks));
    }
    EXPECT_EQ(norm_plan(1000, longest / kF32 + 4, kF32, sums), NormPlan{});
  }
}

TEST(NormPlan, RowsOfBrokenPacksTakeTwoPasses) {
  EXPECT_EQ(norm_plan(64, 31, kF32, 1), NormPlan{});
  EXPECT_EQ(norm_plan(64, 20, kBf16, 1), NormPlan{});
  EXPECT_EQ(norm_plan(int64_t{1} << 31, 128, kBf16, 1), NormPlan{});
}

TEST(NormPlan, Prints) {
  std::ostringstream out;
  out << norm_plan(129, 128, kBf16, 1) << "; " << NormPlan{};
  EXPECT_EQ(out.str(),
            "3 parts of 256 threads, 16 lanes a row, 1 packs a lane, 4 rows a "
            "lane, 0 tiles; two passes");
}

}  // namespace
}  // namespace tapeline
