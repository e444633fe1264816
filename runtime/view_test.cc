#include "runtime/view.h"

#include <numeric>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

std::vector<int> counted(int n) {
  std::vector<int> values(static_cast<size_t>(n));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

TEST(View, IndexesRowMajor) {
  std::vector<int> values = counted(24);
  const View<int> view = view_of(values, {2, 3, 4});
  EXPECT_EQ(view(1, 2, 3), 23);
  EXPECT_EQ(view[1](2, 3), 23);
  EXPECT_EQ(view[1][2](3), 23);
  EXPECT_TRUE(view.contiguous());
  view(0, 1, 2) = -1;
  EXPECT_EQ(values[6], -1);
}

TEST(View, SlicesAndTransposesShareTheBytes) {
  std::vector<int> values = counted(12);
  const View<const int> view = view_of(std::as_const(values), {3, 4});
  const View<const int> columns = view.slice(-1, 1, 3);
  EXPECT_EQ(columns.shape, (Shape{3, 2}));
  EXPECT_EQ(columns(2, 0), 9);
  EXPECT_FALSE(columns.contiguous());
  const View<const int> turned = view.transpose(0, 1);
  EXPECT_EQ(turned.shape, (Shape{4, 3}));
  EXPECT_EQ(turned(3, 1), 7);
  EXPECT_EQ(view.slice(0, 1, 2)[0](2), 6);
  EXPECT_EQ(view.slice(0, 1, 1).elements(), 0);
}

TEST(View, OfNothingIsFalse) {
  EXPECT_FALSE(View<int>());
  std::vector<int> values = counted(1);
  EXPECT_TRUE(view_of(values, {1}));
}

TEST(ViewDeathTest, NeedsTheRightCount) {
  std::vector<int> values = counted(5);
  EXPECT_DEATH(view_of(values, {2, 3}), "5 vs 6");
}

}  // namespace
}  // namespace tapeline
