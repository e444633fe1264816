#include "runtime/shape.h"

#include <vector>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

TEST(Shape, CountsIndexesAndPrints) {
  const Shape shape{2, 3, 4};
  EXPECT_EQ(shape.rank(), 3);
  EXPECT_EQ(shape[0], 2);
  EXPECT_EQ(shape[-1], 4);
  EXPECT_EQ(shape.elements(), 24);
  EXPECT_EQ(to_string(shape), "[2, 3, 4]");
  EXPECT_EQ(Shape().elements(), 1);
  EXPECT_EQ(to_string(Shape()), "[]");
  EXPECT_EQ((Shape{3, 0}).elements(), 0);
  EXPECT_EQ(std::vector<int64_t>(shape.begin(), shape.end()),
            (std::vector<int64_t>{2, 3, 4}));
}

TEST(Shape, EqualityNeedsRankAndExtents) {
  EXPECT_EQ((Shape{2, 3}), (Shape{2, 3}));
  EXPECT_FALSE((Shape{2, 3}) == (Shape{3, 2}));
  EXPECT_FALSE((Shape{2}) == (Shape{2, 1}));
  EXPECT_FALSE((Shape{}) == (Shape{0}));
}

TEST(Strides, AreRowMajor) {
  EXPECT_EQ(contiguous_strides({2, 3, 4}), (Shape{12, 4, 1}));
  EXPECT_EQ(contiguous_strides({5}), (Shape{1}));
  EXPECT_EQ(contiguous_strides({}), (Shape{}));
}

TEST(Strides, ContiguityIgnoresExtentsOfOne) {
  EXPECT_TRUE(is_contiguous({2, 3}, {3, 1}));
  EXPECT_FALSE(is_contiguous({2, 3}, {1, 2}));
  EXPECT_FALSE(is_contiguous({2, 3}, {4, 1}));
  EXPECT_TRUE(is_contiguous({1, 3}, {99, 1}));
  EXPECT_TRUE(is_contiguous({3, 1}, {1, 99}));
  EXPECT_TRUE(is_contiguous({}, {}));
}

TEST(ShapeDeathTest, HasAtMostFourDimensions) {
  EXPECT_DEATH(Shape({1, 2, 3, 4, 5}), "5 vs 4");
  Shape shape{1, 2, 3, 4};
  EXPECT_DEATH(shape.push_back(5), "4 vs 4");
}

}  // namespace
}  // namespace tapeline
