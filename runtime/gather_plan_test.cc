#include "runtime/gather_plan.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

// What a GPU does with a plan, one index after the other.
std::vector<uint8_t> gathered(const GatherPlan& plan, const uint8_t* from) {
  std::vector<uint8_t> to(static_cast<size_t>(plan.count) * plan.word);
  for (int64_t i = 0; i < plan.count; ++i) {
    int64_t rest = i, at = 0;
    for (int d = plan.dims - 1; d >= 0; --d) {
      at += rest % plan.size[d] * plan.stride[d];
      rest /= plan.size[d];
    }
    std::memcpy(&to[static_cast<size_t>(i) * plan.word],
                from + at * static_cast<int64_t>(plan.word), plan.word);
  }
  return to;
}

TEST(GatherPlan, HasTheWidestWordsThatRowsAllow) {
  // Heads first, of rows of 64 two-byte elements.
  const GatherPlan heads = plan_gather(2, {4, 10, 64}, {64, 256, 1}, 16);
  EXPECT_EQ(heads.word, 16u);
  EXPECT_EQ(heads.count, 4 * 10 * 8);
  EXPECT_EQ(heads.dims, 3);
  EXPECT_EQ(heads.stride[0], 8);
  EXPECT_EQ(heads.stride[1], 32);
  EXPECT_TRUE(heads.small);
  // An address, a row or a stride that is no multiple.
  EXPECT_EQ(plan_gather(2, {4, 10, 64}, {64, 256, 1}, 8).word, 8u);
  EXPECT_EQ(plan_gather(2, {4, 10, 64}, {64, 256, 1}, 2).word, 2u);
  EXPECT_EQ(plan_gather(2, {10, 36}, {64, 1}, 16).word, 8u);
  EXPECT_EQ(plan_gather(2, {10, 64}, {66, 1}, 16).word, 4u);
  EXPECT_EQ(plan_gather(4, {10, 64}, {65, 1}, 16).word, 4u);
  // A transposed matrix has no rows.
  EXPECT_EQ(plan_gather(4, {64, 32}, {1, 64}, 16).word, 4u);
}

TEST(GatherPlan, MergesWhatIsOneInMemory) {
  // Every second row of a batch: the last two dimensions are one.
  const GatherPlan plan = plan_gather(4, {3, 4, 8}, {64, 8, 1}, 4);
  EXPECT_EQ(plan.dims, 2);
  EXPECT_EQ(plan.size[0], 3);
  EXPECT_EQ(plan.size[1], 32);
  EXPECT_EQ(plan_gather(4, {1, 1}, {7, 9}, 16).count, 1);
  // A row for all.
  const GatherPlan row = plan_gather(4, {5, 8}, {0, 1}, 16);
  EXPECT_EQ(row.word, 16u);
  EXPECT_EQ(row.stride[0], 0);
}

TEST(GatherPlan, IsSmallBelowTwoToThe32Words) {
  const int64_t many = int64_t{1} << 20;
  EXPECT_TRUE(plan_gather(2, {2, many}, {2 * many, 1}, 2).small);
  EXPECT_FALSE(plan_gather(2, {4097, many}, {2 * many, 1}, 2).small);
  EXPECT_FALSE(plan_gather(2, {2, 64}, {int64_t{1} << 33, 1}, 2).small);
}

TEST(GatherPlan, CopiesWhatALoopCopies) {
  std::mt19937 random(7);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  int wide = 0, merged = 0;
  for (int round = 0; round < 3000; ++round) {
    // A dense tensor, some of each dimension, in another order.
    const int rank = 1 + static_cast<int>(below(4));
    std::vector<int64_t> full, stride(rank, 1), size;
    for (int d = 0; d < rank; ++d) full.push_back(1 + below(3) * below(9));
    for (int d = rank - 2; d >= 0; --d) stride[d] = stride[d + 1] * full[d + 1];
    std::vector<int> order(rank);
    std::iota(order.begin(), order.end(), 0);
    if (below(2) == 0) std::shuffle(order.begin(), order.end(), random);
    Shape shape, strides;
    for (const int d : order) {
      const int64_t part = below(3) == 0 ? 1 + below(full[d]) : full[d];
      size.push_back(part);
      shape.push_back(part);
      strides.push_back(below(9) == 0 ? 0 : stride[d]);
    }
    const size_t element = size_t{1} << below(4);
    const size_t alignment = element << below(5);
    std::vector<uint8_t> memory(static_cast<size_t>(stride[0] * full[0]) *
                                element);
    for (uint8_t& byte : memory) byte = static_cast<uint8_t>(random());
    std::vector<uint8_t> expected;
    for (int64_t i = 0; i < shape.elements(); ++i) {
      int64_t rest = i, at = 0;
      for (int d = rank - 1; d >= 0; --d) {
        at += rest % size[d] * strides[d];
        rest /= size[d];
      }
      const auto first = memory.begin() + at * static_cast<int64_t>(element);
      expected.insert(expected.end(), first,
                      first + static_cast<int64_t>(element));
    }
    const GatherPlan plan = plan_gather(element, shape, strides, alignment);
    ASSERT_EQ(gathered(plan, memory.data()), expected)
        << "shape " << shape << " strides " << strides;
    EXPECT_LE(plan.word, std::max(alignment, element));
    wide += plan.word > element;
    merged += plan.dims < rank;
  }
  EXPECT_GT(wide, 300);
  EXPECT_GT(merged, 300);
}

}  // namespace
}  // namespace tapeline
