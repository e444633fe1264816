#include "runtime/random.h"

#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

using Words = std::array<uint32_t, 4>;

// Known answers published with Random123 (kat_vectors, philox4x32 10).
TEST(Philox, AgreesWithThePublishedVectors) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                       {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

std::vector<float> filled(int64_t n, uint64_t seed, std::string_view name,
                          uint64_t first) {
  std::vector<float> out(static_cast<size_t>(n),
                         std::numeric_limits<float>::quiet_NaN());
  fill_normal(view_of(out, {n}), 0.02f, seed, name, first);
  return out;
}

TEST(FillNormal, PartsEqualTheWhole) {
  const std::vector<float> whole = filled(103, 7, "model.norm.weight", 0);
  for (int64_t cut : {1, 2, 3, 4, 5, 50, 101}) {
    std::vector<float> parts = filled(cut, 7, "model.norm.weight", 0);
    const std::vector<float> rest =
        filled(103 - cut, 7, "model.norm.weight", static_cast<uint64_t>(cut));
    parts.insert(parts.end(), rest.begin(), rest.end());
    EXPECT_EQ(parts, whole) << "cut at " << cut;
  }
}

TEST(FillNormal, EqualsTheElementwiseGenerator) {
  const Random random(7, "w");
  const std::vector<float> values = filled(9, 7, "w", 5);
  for (uint64_t j = 0; j < 9; ++j) {
    EXPECT_EQ(values[j], 0.02f * random.normal(5 + j));
  }
}

TEST(FillNormal, HasTheMomentsOfANormal) {
  const std::vector<float> values = filled(200000, 3, "embed", 0);
  double sum = 0, squares = 0, fourth = 0;
  int beyond = 0;
  for (float v : values) {
    const double x = v / 0.02;
    ASSERT_TRUE(std::isfinite(x));
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
    beyond += std::abs(x) > 1.96;
  }
  const double n = static_cast<double>(values.size());
  // Five standard errors of each estimate.
  EXPECT_NEAR(sum / n, 0.0, 5 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 1.0, 5 * std::sqrt(2 / n));
  EXPECT_NEAR(fourth / n, 3.0, 5 * std::sqrt(96 / n));
  EXPECT_NEAR(beyond / n, 0.05, 5 * std::sqrt(0.05 * 0.95 / n));
}

TEST(Random, EveryPartOfTheKeyChoosesAnotherStream) {
  std::set<uint64_t> first;
  first.insert(Random(1, "w").bits64(0));
  first.insert(Random(2, "w").bits64(0));
  first.insert(Random(1, "v").bits64(0));
  first.insert(Random(1, "w", 1).bits64(0));
  first.insert(Random(1, "w", 0, 1).bits64(0));
  first.insert(Random(uint64_t{1} << 40, "w").bits64(0));
  EXPECT_EQ(first.size(), 6u);
}

TEST(Random, StreamsStayTheSameBetweenReleases) {
  // Pins (seed, name) -> stream: initial weights of old runs depend on it.
  // Computed with xxhsum -H2 and a Python Philox.
  const Random random(1234, "model.embed_tokens.weight", 5, 6);
  EXPECT_EQ(random.block(0),
            (Words{0x4c2b5583, 0xcdc96fa5, 0xfeb293a9, 0x0c0d9a8c}));
}

TEST(Random, BitsAreTheWordsOfBlocks) {
  const Random random(9, "x");
  for (uint64_t i = 0; i < 16; ++i) {
    EXPECT_EQ(random.bits(i), random.block(i / 4)[i % 4]);
    EXPECT_EQ(random.bits64(i),
              random.bits(2 * i) | uint64_t{random.bits(2 * i + 1)} << 32);
  }
  // Past 32 bits of block index the counter carries on.
  EXPECT_NE(random.bits(uint64_t{1} << 34), random.bits(0));
}

TEST(Random, UniformStaysBelowOne) {
  const Random random(11, "u");
  double sum = 0;
  for (uint64_t i = 0; i < 100000; ++i) {
    const float u = random.uniform(i);
    ASSERT_GE(u, 0.0f);
    ASSERT_LT(u, 1.0f);
    sum += u;
  }
  EXPECT_NEAR(sum / 100000, 0.5, 5 * std::sqrt(1.0 / 12 / 100000));
}

TEST(Random, BelowReachesEveryValueEvenly) {
  const Random random(13, "b");
  std::vector<int> counts(7);
  for (uint64_t i = 0; i < 70000; ++i) ++counts[random.below(7, i)];
  for (int count : counts) EXPECT_NEAR(count, 10000, 5 * std::sqrt(10000.0));
  EXPECT_EQ(random.below(1, 5), 0u);
}

}  // namespace
}  // namespace tapeline
