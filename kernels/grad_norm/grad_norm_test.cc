#include "kernels/grad_norm/grad_norm.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/grad_norm/grad_norm_cases.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

template <class A>
std::vector<A> draw(int64_t n) {
  std::mt19937 random(static_cast<uint32_t>(n));
  std::vector<A> out(n);
  for (A& x : out) {
    x = static_cast<A>(static_cast<double>(random()) * 0x1p-31 - 1);
  }
  return out;
}

template <class A>
View<const A> view(const std::vector<A>& x) {
  return view_of(x, Shape{static_cast<int64_t>(x.size())});
}

class GradNormLengths : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(, GradNormLengths,
                         testing::ValuesIn(grad_norm_lengths()));

TEST_P(GradNormLengths, SquaredNormIsTheSumOfSquares) {
  const auto f32 = draw<float>(GetParam());
  const auto f64 = draw<double>(GetParam());
  long double a = 0, b = 0;
  for (float x : f32) a += static_cast<long double>(x) * x;
  for (double x : f64) b += static_cast<long double>(x) * x;
  EXPECT_NEAR(squared_norm(launch(), view(f32)), double(a), 1e-14 * double(a));
  EXPECT_NEAR(squared_norm(launch(), view(f64)), double(b), 1e-14 * double(b));
}

TEST_P(GradNormLengths, EveryElementCounts) {
  // A single 3 anywhere: where cuts are and at both ends.
  std::vector<float> x(GetParam());
  const int64_t n = GetParam();
  for (int64_t i :
       {int64_t{0}, n / 2, n - 2, n - 1, int64_t{16383}, int64_t{16384}}) {
    if (i < 0 || i >= n) continue;
    x[i] = 3;
    EXPECT_EQ(squared_norm(launch(), view(x)), 9) << i;
    x[i] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_FALSE(all_finite(launch(), view(x))) << i;
    EXPECT_TRUE(std::isnan(squared_norm(launch(), view(x)))) << i;
    x[i] = -std::numeric_limits<float>::infinity();
    EXPECT_FALSE(all_finite(launch(), view(x))) << i;
    EXPECT_TRUE(std::isinf(squared_norm(launch(), view(x)))) << i;
    x[i] = 0;
  }
  EXPECT_TRUE(all_finite(launch(), view(x)));
}

TEST_P(GradNormLengths, ThreadsDoNotChangeABit) {
  const auto x = draw<float>(GetParam());
  Threads one(1);
  const double expected = squared_norm(one.launch(), view(x));
  for (int n : {2, 3, 7}) {
    Threads many(n);
    EXPECT_EQ(squared_norm(many.launch(), view(x)), expected);
  }
}

TEST(GradNorm, ManyChunksRunOnWorkers) {
  const auto x = draw<float>(1000003);
  Buffer<double> out({1});
  EXPECT_TRUE(SameForAnyThreads(
      out, [&](Launch l) { out.view()(0) = squared_norm(l, view(x)); }));
}

TEST(GradNorm, LargeAndSmallElementsDoNotOverflowOrVanish) {
  const std::vector<float> large = {3e38f, -3e38f}, small = {1e-40f, 2e-45f};
  EXPECT_NEAR(squared_norm(launch(), view(large)), 1.8e77, 1e71);
  EXPECT_GT(squared_norm(launch(), view(small)), 0);
  EXPECT_TRUE(all_finite(launch(), view(large)));
  EXPECT_TRUE(all_finite(launch(), view(small)));
}

TEST_P(GradNormLengths, SumsStayWhereTheyAreMade) {
  const auto x = draw<float>(GetParam());
  Buffer<double> partial({kNormPartials}), each({1});
  squared_norms<float>(launch(), {view(x)}, partial.view(), each.view());
  EXPECT_EQ(each.values()[0], squared_norm(launch(), view(x)));
  EXPECT_TRUE(partial.guards_intact() && each.guards_intact());
}

// More tensors than one launch takes, empty ones and unaligned ones among them.
template <class A>
void expect_the_norms_alone() {
  const int64_t count = 300;
  const auto x = draw<A>(700000);
  std::vector<View<const A>> all;
  std::vector<double> alone;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n = i % 7 == 3 ? 0 : i % 50 == 49 ? 600000 : 17 * i;
    all.push_back({x.data() + i % 5, Shape{n}});
    alone.push_back(squared_norm(launch(), all.back()));
  }
  Buffer<double> partial({count * kNormPartials}), each({count}), total({1});
  squared_norms(launch(), all, partial.view(), each.view());
  EXPECT_EQ(each.values(), alone);
  total.set({0.5});
  add_in_order(launch(), each.in(), total.view());
  double expected = 0.5;
  for (double one : alone) expected += one;
  EXPECT_EQ(total.values()[0], expected);
  EXPECT_TRUE(partial.guards_intact() && each.guards_intact() &&
              total.guards_intact());
}
TEST(GradNorm, OfManyTensorsIsThatOfEach) {
  expect_the_norms_alone<float>();
  expect_the_norms_alone<double>();
}

TEST(GradNorm, SumsGoOneAfterTheOther) {
  // 2^53 + 1 + 1 is 2^53 in this order, and more in another.
  std::vector<double> values(2500, 1.0);
  values[0] = 0x1p53;
  Buffer<double> each({2500}), total({1});
  each.set(values);
  total.set({0.0});
  add_in_order(launch(), each.in(), total.view());
  EXPECT_EQ(total.values()[0], 0x1p53);
}

TEST(ClipFactor, FollowsTorch) {
  Buffer<double> squares({1}), factor({1});
  const auto clip = [&](double s, double max_norm) {
    squares.set({s});
    clip_factor(launch(), squares.in(), max_norm, factor.view());
    return factor.values()[0];
  };
  EXPECT_DOUBLE_EQ(clip(16, 1), 1 / 4.000001);
  EXPECT_EQ(clip(0.25, 1), 1);
  EXPECT_EQ(clip(0, 1), 1);
  EXPECT_EQ(clip(1e10, 0), 1);
  EXPECT_TRUE(std::isnan(clip(std::numeric_limits<double>::infinity(), 1)));
  EXPECT_TRUE(std::isnan(clip(std::nan(""), 0)));
}

TEST(GradNormDeath, StridesAreAnError) {
  const std::vector<float> x(12);
  const View<const float> strided(x.data(), Shape{3, 2}, Shape{4, 1});
  EXPECT_DEATH(squared_norm(launch(), strided),
               "f32\\[3, 2\\] of strides \\[4, 1\\]");
}

}  // namespace
}  // namespace tapeline
