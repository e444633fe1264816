#include "kernels/cross_entropy/cross_entropy_fast.h"

#include <sstream>

#include "gtest/gtest.h"

namespace tapeline::cuda {
namespace {

std::string plan(bool bf16, bool whole, int64_t vocabulary) {
  std::ostringstream out;
  out << cross_entropy_plan(bf16, whole, vocabulary);
  return out.str();
}

TEST(CrossEntropyPlan, VocabulariesOfModelsHaveClusters) {
  EXPECT_EQ(plan(true, true, 154880),
            "clusters of 4 blocks, 10 packs a thread");
  EXPECT_EQ(plan(true, true, 151936),
            "clusters of 4 blocks, 10 packs a thread");
  EXPECT_EQ(plan(true, true, 129280), "clusters of 4 blocks, 8 packs a thread");
}

TEST(CrossEntropyPlan, OtherRowsAreReadByTwoKernels) {
  const std::string apart = "forward, then backward";
  EXPECT_EQ(plan(false, true, 151936), apart);
  EXPECT_EQ(plan(true, false, 151936), apart);
  EXPECT_EQ(plan(true, true, 256), apart);
}

TEST(CrossEntropyPlan, ShorterRowsWouldWaitAndLongerOnesDoNotFit) {
  constexpr int64_t kTurn = kRowThreads * 8;
  EXPECT_EQ(cross_entropy_plan(true, true, 5 * kTurn).packs, 0);
  EXPECT_EQ(cross_entropy_plan(true, true, 5 * kTurn + 8).packs, 6);
  EXPECT_EQ(cross_entropy_plan(true, true, 10 * kTurn).packs, 10);
  EXPECT_EQ(cross_entropy_plan(true, true, 10 * kTurn + 8).packs, 0);
}

}  // namespace
}  // namespace tapeline::cuda
