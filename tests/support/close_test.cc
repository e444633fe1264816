#include "tests/support/close.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>

namespace tapeline {
namespace {

std::vector<double> normal(int64_t n, uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<double> draw;
  std::vector<double> values(n);
  for (double& v : values) v = draw(random);
  return values;
}

template <class T>
std::vector<T> rounded(const std::vector<double>& values) {
  std::vector<T> out;
  for (double v : values) out.push_back(T(static_cast<float>(v)));
  return out;
}

std::string message(const testing::AssertionResult& result) {
  return result.message();
}

template <class T>
class CloseOf : public testing::Test {};
using Lossy = testing::Types<float, bf16>;
TYPED_TEST_SUITE(CloseOf, Lossy);

TYPED_TEST(CloseOf, RoundingPasses) {
  const std::vector<double> expected = normal(4096);
  EXPECT_TRUE(Close(rounded<TypeParam>(expected), expected));
}

TYPED_TEST(CloseOf, OneElementOffByFivePercentFails) {
  const std::vector<double> expected = normal(4096);
  std::vector<double> values = expected;
  ASSERT_GT(std::abs(values[1234]), 0.1);
  values[1234] *= 1.05;
  const auto result =
      Close(rounded<TypeParam>(values), expected, {.sum_length = 128});
  EXPECT_FALSE(result);
  EXPECT_NE(message(result).find("[element] 1 of 4096"), std::string::npos)
      << message(result);
  EXPECT_NE(message(result).find("[1234]"), std::string::npos);
}

TYPED_TEST(CloseOf, PermutedRowFails) {
  const Shape shape{64, 128};
  const std::vector<double> expected = normal(shape.elements());
  std::vector<double> values = expected;
  std::swap_ranges(values.begin() + 128, values.begin() + 256,
                   values.begin() + 256);
  const std::vector<TypeParam> got = rounded<TypeParam>(values);
  EXPECT_FALSE(Close(view_of(got, shape), view_of(expected, shape)));
}

TYPED_TEST(CloseOf, OneWrongTileOfALargeMatrixFails) {
  const Shape shape{1024, 2048};
  const std::vector<double> expected = normal(shape.elements());
  std::vector<double> values = expected;
  const std::vector<double> other = normal(shape.elements(), 2);
  for (int64_t i = 256; i < 384; ++i) {
    for (int64_t j = 512; j < 768; ++j) values[i * 2048 + j] = other[j];
  }
  const std::vector<TypeParam> got = rounded<TypeParam>(values);
  EXPECT_FALSE(Close(view_of(got, shape), view_of(expected, shape)));
}

TYPED_TEST(CloseOf, SmallErrorEverywhereFailsAsAWhole) {
  const std::vector<double> expected = normal(100000);
  std::vector<double> values = expected;
  const Bounds bound = bounds(dtype_of<TypeParam>(), DType::kF64, {});
  for (double& v : values) v *= 1 + 1.2 * std::sqrt(2 * bound.whole);
  const std::vector<TypeParam> got = rounded<TypeParam>(values);
  const auto result = Close(got, expected);
  EXPECT_FALSE(result);
  EXPECT_NE(message(result).find("[whole]"), std::string::npos)
      << message(result);
}

TYPED_TEST(CloseOf, InfinitiesAndNansStandAtTheSamePlaces) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> expected = {1, inf, -inf, nan, 2};
  std::vector<double> values = expected;
  EXPECT_TRUE(Close(rounded<TypeParam>(values), expected));
  for (double wrong : {-inf, nan, 3e38}) {
    values[1] = wrong;
    const auto result = Close(rounded<TypeParam>(values), expected);
    EXPECT_NE(message(result).find("[inf/nan"), std::string::npos);
    EXPECT_FALSE(result) << wrong;
  }
  values = expected;
  values[0] = nan;
  EXPECT_FALSE(Close(rounded<TypeParam>(values), expected));
}

TEST(Close, ZerosOfAnEmptySumAreExact) {
  const std::vector<double> expected(16, 0.0);
  std::vector<float> got(16, 0.0f);
  EXPECT_TRUE(Close(got, expected));
  got[3] = 1e-30f;
  EXPECT_FALSE(Close(got, expected));
}

TEST(Close, ShapesMustAgree) {
  const std::vector<float> values(12);
  const std::vector<double> expected(12);
  EXPECT_FALSE(
      Close(view_of(values, Shape{3, 4}), view_of(expected, Shape{4, 3})));
}

TEST(Close, FollowsStrides) {
  std::vector<float> values = {1, 9, 2, 9, 3, 9};
  const std::vector<double> expected = {1, 3, 2, 0, 0, 0};
  const View<const float> got(values.data(), Shape{3}, Shape{2});
  const std::vector<double> tight = {1, 2, 3};
  EXPECT_TRUE(Close(got, view_of(tight, Shape{3})));
  EXPECT_FALSE(
      Close(got, View<const double>(expected.data(), Shape{3}, Shape{1})));
}

TEST(Close, LongerSumsMayDifferMoreButNotMuch) {
  const Bounds one = bounds(DType::kF32, DType::kF64, {});
  const Bounds many = bounds(DType::kF32, DType::kF64, {.sum_length = 10000});
  EXPECT_NEAR(many.absolute / one.absolute, 100, 1e-6);
  EXPECT_EQ(many.relative, one.relative);
  EXPECT_LT(one.absolute, 1e-6);
  EXPECT_LT(bounds(DType::kBf16, DType::kF32, {.sum_length = 4096}).whole,
            1e-5);
}

TEST(Bitwise, SeesTheSignOfZeroAndNothingElse) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> a = {0.0f, nan, 1.0f};
  std::vector<float> b = a;
  EXPECT_TRUE(Bitwise(a, b));
  b[0] = -0.0f;
  const auto result = Bitwise(a, b);
  EXPECT_FALSE(result);
  EXPECT_NE(message(result).find("1 of 3"), std::string::npos);
  b = a;
  b[2] = std::nextafter(1.0f, 2.0f);
  EXPECT_FALSE(Bitwise(a, b));
}

}  // namespace
}  // namespace tapeline
