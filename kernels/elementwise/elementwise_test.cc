#include "kernels/elementwise/elementwise.h"

#include <cmath>
#include <numeric>

#include "gtest/gtest.h"
#include "kernels/elementwise/elementwise_cases.h"
#include "tests/support/buffer.h"
#include "tests/support/cases.h"
#include "tests/support/close.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

template <class T>
class Elementwise : public testing::Test {};
using FloatTypes = testing::Types<float, bf16, double>;
TYPED_TEST_SUITE(Elementwise, FloatTypes);

// f applied to each pair, in f64.
template <class F>
std::vector<double> each(const std::vector<double>& a,
                         const std::vector<double>& b, F f) {
  std::vector<double> out;
  for (size_t i = 0; i < a.size(); ++i) out.push_back(f(a[i], b[i]));
  return out;
}

template <class T>
void expect_close(const Buffer<T>& got, const std::vector<double>& expected) {
  EXPECT_TRUE(Close(got.in(), view_of(expected, got.in().shape)))
      << describe(got.in());
  EXPECT_TRUE(got.guards_intact()) << describe(got.in());
}

TYPED_TEST(Elementwise, ComputesEveryElementOfEveryCase) {
  using T = TypeParam;
  const Launch l = launch();
  for (const ElementwiseCase& c : each(elementwise_cases())) {
    Buffer<T> a(c.shape, c.gap_x), b(c.shape, c.gap_y), y(c.shape, c.gap_y);
    a.normal(1);
    b.normal(2);
    const std::vector<double> av = a.values(), bv = b.values();

    add(l, a.in(), b.in(), y.view());
    expect_close(y, each(av, bv, [](double a, double b) { return a + b; }));
    y.poison();
    mul(l, a.in(), b.in(), y.view());
    expect_close(y, each(av, bv, [](double a, double b) { return a * b; }));
    y.poison();
    scale(l, -1.5, a.in(), y.view());
    expect_close(y, each(av, bv, [](double a, double) { return -1.5 * a; }));
    y.set(bv);
    accumulate(l, a.in(), y.view());
    expect_close(y, each(av, bv, [](double a, double b) { return a + b; }));
    y.set(bv);
    axpy(l, 0.25, a.in(), y.view());
    expect_close(y, each(av, bv, [](double a, double b) { return b + a / 4; }));
  }
}

TYPED_TEST(Elementwise, OutputMayBeAnInput) {
  using T = TypeParam;
  Buffer<T> a({40, 50}, 3), b({40, 50});
  a.normal(1);
  b.normal(2);
  const std::vector<double> expected =
      each(a.values(), b.values(), [](double a, double b) { return a + b; });
  add(launch(), a.in(), b.in(), a.view());
  expect_close(a, expected);
}

TYPED_TEST(Elementwise, ZeroStridesBroadcastAnInput) {
  using T = TypeParam;
  Buffer<T> a({3, 5}), row({5}), y({3, 5});
  a.normal(1);
  row.normal(2);
  const View<const T> rows(row.in().data, Shape{3, 5}, Shape{0, 1});
  add(launch(), a.in(), rows, y.view());
  std::vector<double> expected = a.values();
  for (int i = 0; i < 15; ++i) expected[i] += row.values()[i % 5];
  expect_close(y, expected);
}

TYPED_TEST(Elementwise, SumTakesAnyShape) {
  using T = TypeParam;
  using A = Accumulator<T>;
  for (const ElementwiseCase& c : each(elementwise_cases())) {
    Buffer<T> x(c.shape, c.gap_x);
    x.normal(3);
    std::vector<double> values = x.values();
    for (double& v : values) v = std::abs(v);  // no cancellation
    x.set(values);
    Buffer<A> y({1});
    sum(launch(), x.in(), y.view());
    expect_close(y, {std::accumulate(values.begin(), values.end(), 0.0)});
  }
}

TYPED_TEST(Elementwise, SumFollowsAStrideInTheLastDimension) {
  using T = TypeParam;
  Buffer<T> x({8, 8});
  std::vector<double> values(64);
  for (int i = 0; i < 64; ++i) values[i] = i % 8 == 2 ? i : 100;
  x.set(values);
  Buffer<Accumulator<T>> y({1});
  sum(launch(), View<const T>(x.in().data + 2, Shape{8}, Shape{8}), y.view());
  EXPECT_EQ(y.values()[0], 2 + 10 + 18 + 26 + 34 + 42 + 50 + 58);
}

TYPED_TEST(Elementwise, BitsDoNotDependOnThreads) {
  using T = TypeParam;
  for (const int64_t gap : {0, 4}) {
    const Shape shape{1024, 400};
    Buffer<T> a(shape, gap), b(shape), y(shape, gap);
    a.normal(1);
    b.normal(2);
    EXPECT_TRUE(SameForAnyThreads(
        y, [&](Launch l) { add(l, a.in(), b.in(), y.view()); }));
    Buffer<Accumulator<T>> total({1});
    EXPECT_TRUE(SameForAnyThreads(
        total, [&](Launch l) { sum(l, a.in(), total.view()); }));
  }
}

// 1 + 2^-8 lies halfway between two bf16 values; 2^-9 more decides.
TEST(Accumulate, RoundsAfterTheAddition) {
  Buffer<bf16> x({3}), y({3});
  x.set({0.00390625, 0.005859375, 0.01171875});
  y.set({1, 1, 1});
  accumulate(launch(), x.in(), y.view());
  EXPECT_EQ(y.values(), (std::vector<double>{1, 1.0078125, 1.015625}));
}

TEST(Axpy, AddsBf16IntoAnFp32SinkExactly) {
  Buffer<bf16> x({2});
  Buffer<float> y({2});
  x.set({0.00390625, 3});
  y.set({1, 1000.125});
  axpy(launch(), 1, x.in(), y.view());
  EXPECT_EQ(y.values(), (std::vector<double>{1.00390625, 1003.125}));
}

TEST(Cast, RoundsToNearestEvenWithoutBias) {
  constexpr int kN = 100000;
  Buffer<float> x({kN});
  std::vector<double> values;
  for (int i = 0; i < kN; ++i) values.push_back(1 + std::fmod(i * 0.618034, 1));
  x.set(values);
  Buffer<bf16> y({kN});
  cast(launch(), x.in(), y.view());
  EXPECT_TRUE(Close(y.in(), x.in()));
  int64_t below = 0, equal = 0;
  const std::vector<double> xs = x.values(), ys = y.values();
  for (int i = 0; i < kN; ++i) {
    below += ys[i] < xs[i];
    equal += ys[i] == xs[i];
  }
  // A share of one half, within ten standard deviations.
  EXPECT_NEAR(below / double(kN - equal), 0.5, 10 / std::sqrt(4.0 * kN));
}

TEST(Cast, ConvertsBetweenAllFloatDtypes) {
  const std::vector<double> exact = {0, -1.5, 256, 0.0078125, -3.0e38, 1e-38};
  Buffer<double> d({6});
  Buffer<float> f({6});
  Buffer<bf16> b({6});
  d.set(exact);
  cast(launch(), d.in(), f.view());
  cast(launch(), f.in(), b.view());
  EXPECT_EQ(f.values()[1], -1.5);
  EXPECT_EQ(f.values()[5], double(1e-38f));
  for (int i = 0; i < 4; ++i) EXPECT_EQ(b.values()[i], exact[i]);
  d.poison();
  cast(launch(), b.in(), d.view());
  EXPECT_EQ(d.values(), b.values());
  Buffer<bf16> again({6});
  cast(launch(), d.in(), again.view());
  EXPECT_TRUE(Bitwise(again.in(), b.in()));
}

TEST(Cast, WidensAndNarrowsIntegers) {
  Buffer<int32_t> a({3}), c({3});
  Buffer<int64_t> b({3});
  a.set({-1, 0, 2147483647});
  cast(launch(), a.in(), b.view());
  EXPECT_EQ(b.values(), a.values());
  cast(launch(), b.in(), c.view());
  EXPECT_EQ(c.values(), a.values());
}

TEST(Copy, MovesAnyStridesOnBothSides) {
  Buffer<int32_t> x({2, 3, 4, 5}, 2);
  std::vector<double> values(120);
  std::iota(values.begin(), values.end(), 0);
  x.set(values);
  // [2, 3, 4, 5] -> [5, 3, 2, 4]
  const View<const int32_t> turned = x.in().transpose(0, 3).transpose(2, 3);
  Buffer<int32_t> y({5, 3, 2, 4}, 1);
  copy(launch(), turned, y.view());
  const std::vector<double> got = y.values();
  for (int a = 0; a < 5; ++a) {
    for (int b = 0; b < 3; ++b) {
      for (int c = 0; c < 2; ++c) {
        for (int d = 0; d < 4; ++d) {
          EXPECT_EQ(got[((a * 3 + b) * 2 + c) * 4 + d],
                    ((c * 3 + b) * 4 + d) * 5 + a);
        }
      }
    }
  }
  EXPECT_TRUE(y.guards_intact());
  // And back, into a strided destination.
  Buffer<int32_t> back({2, 3, 4, 5}, 2);
  copy(launch(), y.in(), back.view().transpose(0, 3).transpose(2, 3));
  EXPECT_TRUE(Bitwise(back.in(), x.in()));
}

TEST(Copy, KeepsTheBitsOfNans) {
  Buffer<bf16> x({4}), y({4});
  x.poison();
  y.set({1, 2, 3, 4});
  copy(launch(), x.in(), y.view());
  EXPECT_TRUE(Bitwise(y.in(), x.in()));
}

TEST(Fill, WritesOnlyTheView) {
  Buffer<bf16> y({3, 5}, 4);
  fill(launch(), 1.25, y.view());
  EXPECT_EQ(y.values(), std::vector<double>(15, 1.25));
  EXPECT_TRUE(y.guards_intact());
  Buffer<int32_t> ids({7});
  fill(launch(), -1, ids.view());
  EXPECT_EQ(ids.values(), std::vector<double>(7, -1));
}

TEST(ElementwiseDeathTest, ShapesMustAgree) {
  Buffer<float> a({3, 4}), b({4, 3}), y({3, 4});
  a.normal(1);
  b.normal(1);
  EXPECT_DEATH(add(launch(), a.in(), b.in(), y.view()),
               "\\[add\\] shapes differ: f32\\[3, 4\\]; f32\\[4, 3\\]");
}

}  // namespace
}  // namespace tapeline
