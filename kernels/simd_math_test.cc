#include "kernels/simd_math.h"

#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Distance from the exact value in units of the spacing of floats there.
double ulps(float got, double exact) {
  int exponent;
  std::frexp(exact, &exponent);
  const double ulp = std::ldexp(1.0, std::max(exponent - 24, -149));
  return std::abs(got - exact) / ulp;
}

std::vector<float> exp_all(const std::vector<float>& x) {
  std::vector<float> y(x.size(), kNan);
#pragma omp simd
  for (size_t i = 0; i < x.size(); ++i) y[i] = exp_simd(x[i]);
  return y;
}

TEST(ExpSimd, IsWithinTwoUlpsOverTheNormalRange) {
  std::vector<float> x;
  for (int i = 0; i <= 800000; ++i) x.push_back(-87.3f + i * 2.2e-4f);
  for (float tiny = 1; tiny > 1e-40f; tiny /= 3) x.push_back(-tiny);
  const std::vector<float> y = exp_all(x);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    worst = std::max(worst, ulps(y[i], std::exp(double{x[i]})));
  }
  EXPECT_LT(worst, 1.2);
}

TEST(ExpSimd, RoundsOnceIntoTheSubnormals) {
  for (float x = -104.0f; x < -87.0f; x += 0.0137f) {
    EXPECT_LE(ulps(exp_simd(x), std::exp(double{x})), 1.2) << x;
  }
}

TEST(ExpSimd, KeepsTheLimits) {
  EXPECT_EQ(exp_simd(0.0f), 1.0f);
  EXPECT_EQ(exp_simd(-0.0f), 1.0f);
  EXPECT_EQ(exp_simd(-kInf), 0.0f);
  EXPECT_EQ(exp_simd(-1e30f), 0.0f);
  EXPECT_EQ(exp_simd(-104.0f), 0.0f);
  EXPECT_EQ(exp_simd(88.73f), kInf);
  EXPECT_EQ(exp_simd(kInf), kInf);
  EXPECT_TRUE(std::isfinite(exp_simd(88.72f)));
  EXPECT_TRUE(std::isnan(exp_simd(kNan)));
}

// 37 elements: whole vectors and a tail.
TEST(ExpSimd, GivesTheSameBitsInVectorsAndTails) {
  std::vector<float> x(37);
  for (int shift = 0; shift < 37; ++shift) {
    for (int i = 0; i < 37; ++i) x[(i + shift) % 37] = 0.731f * i - 13;
    const std::vector<float> y = exp_all(x);
    for (int i = 0; i < 37; ++i) {
      const float alone = exp_simd(x[i]);
      EXPECT_EQ(std::memcmp(&y[i], &alone, sizeof alone), 0);
    }
  }
}

TEST(Silu, SaturatesAtBothEnds) {
  EXPECT_EQ(sigmoid(-kInf), 0.0f);
  EXPECT_EQ(sigmoid(kInf), 1.0f);
  EXPECT_EQ(sigmoid(0.0f), 0.5f);
  EXPECT_EQ(silu(1000.0f), 1000.0f);
  EXPECT_EQ(silu(-1000.0f), 0.0f);
  EXPECT_NEAR(silu(1.5), 1.5 / (1 + std::exp(-1.5)), 1e-15);
  EXPECT_NEAR(silu(-2.25f), -2.25 / (1 + std::exp(2.25)), 2e-8);
}

TEST(Store, RoundsToBf16LikeItsConstructor) {
  std::mt19937 random(1);
  std::vector<uint32_t> bits = {0,          0x80000000, 0x7f800000, 0xff800000,
                                0x7f800001, 0xffffffff, 0x7f7fffff, 0x3f808000,
                                0x3f818000, 0x00000001, 0x7fc00000};
  for (int i = 0; i < 100000; ++i) bits.push_back(random());
  std::vector<float> x(bits.size());
  std::memcpy(x.data(), bits.data(), bits.size() * sizeof(float));
  std::vector<bf16> y(x.size());
  convert(x.data(), y.data(), static_cast<int64_t>(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(y[i].bits, bf16(x[i]).bits) << std::hex << bits[i];
  }
}

// Every element counts once, at every length around the lane count.
TEST(Reductions, CountEveryElement) {
  for (int64_t n : {0, 1, 7, 31, 32, 33, 63, 64, 65, 127, 128, 200}) {
    std::vector<float> x(n), y(n);
    double expected = 0, total = 0;
    for (int64_t i = 0; i < n; ++i) {
      x[i] = static_cast<float>(i + 1);
      y[i] = static_cast<float>((i * 7) % 5 - 2);
      expected += double{x[i]} * y[i];
      total += x[i];
    }
    EXPECT_EQ(dot(x.data(), y.data(), n), expected) << n;
    EXPECT_EQ(sum(x.data(), n), total) << n;
    EXPECT_EQ(max_of(x.data(), n), n ? n : -kInf) << n;
  }
}

// The written order of additions, not the compiler's or the address's.
TEST(Reductions, AddInTheStatedOrderAtAnyAddress) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (int64_t n : {5, 8, 13, 23, 31, 64, 131}) {
    std::vector<float> values(n + 8);
    for (float& v : values) v = normal(random);
    for (int offset = 0; offset < 8; ++offset) {
      const float* x = values.data() + offset;
      float lane[32] = {};
      for (int64_t i = 0; i < n; ++i) lane[i % 32] += x[i];
      for (int width = 16; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) lane[j] = lane[j] + lane[j + width];
      }
      EXPECT_EQ(sum(x, n), lane[0]) << n << " at " << offset;
      const std::vector<float> ones(n, 1.0f);
      EXPECT_EQ(dot(x, ones.data(), n), lane[0]) << n << " at " << offset;
    }
  }
}

TEST(Reductions, TakeDoubleAndBf16) {
  std::vector<double> d = {1, 2, 3};
  EXPECT_EQ(dot(d.data(), d.data(), 3), 14.0);
  std::vector<bf16> b = {bf16(1.5f), bf16(-2.0f)};
  EXPECT_EQ(dot(b.data(), b.data(), 2), 6.25f);
  EXPECT_EQ(max_of(b.data(), 2), 1.5f);
}

TEST(Axpy, AddsAndRoundsOnce) {
  std::vector<float> x = {1, 2, 3};
  std::vector<float> y = {10, 20, 30};
  axpy(2.0f, x.data(), y.data(), 3);
  EXPECT_EQ(y, (std::vector<float>{12, 24, 36}));
  std::vector<bf16> z = {bf16(256.0f)};
  axpy(1.0f, x.data() + 2, z.data(), 1);  // 259 lies between 258 and 260
  EXPECT_EQ(float(z[0]), 260.0f);
}

}  // namespace
}  // namespace tapeline
