// Rows of scores that every implementation of top_k is tested with.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace tapeline {

struct TopKCase {
  std::string name;
  int64_t rows, keys;
  int k;
  // Scores in row-major order; floats, so that f64 sees the same ties.
  std::vector<float> scores;
  std::vector<std::pair<int32_t, int32_t>> range;  // none: whole rows
};
inline std::ostream& operator<<(std::ostream& out, const TopKCase& c) {
  return out << c.name;
}

// `score` of a standard normal draw and the element's place.
template <class F>
TopKCase drawn(std::string name, int64_t rows, int64_t keys, int k, F score) {
  TopKCase c{std::move(name), rows, keys, k, {}, {}};
  std::mt19937 engine(static_cast<uint32_t>(rows * 1000003 + keys));
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < rows * keys; ++i) {
    c.scores.push_back(score(normal(engine), i));
  }
  return c;
}

inline std::vector<TopKCase> top_k_cases() {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const auto plain = [](float x, int64_t) { return x; };
  std::vector<TopKCase> cases = {
      drawn("Normal", 20, 133, 17, plain),
      drawn("OneKey", 3, 1, 1, plain),
      drawn("ExactlyK", 3, 64, 64, plain),
      drawn("FewerThanK", 3, 9, 64, plain),
      drawn("KIsOne", 20, 65, 1, plain),
      drawn("KIsZero", 3, 9, 0, plain),
      drawn("NoKeys", 3, 0, 4, plain),
      drawn("NoRows", 0, 9, 4, plain),
      drawn("SixteenLevels", 20, 200, 64,
            [](float x, int64_t) { return std::round(x * 3) / 3; }),
      drawn("AllEqual", 3, 100, 7, [](float, int64_t) { return -0.25f; }),
      // ReLU scores: some winners and thousands of zeros, with k among them.
      drawn("ZerosAtTheThreshold", 2, 8320, 2048,
            [](float x, int64_t i) {
              return i % 83 == 0 ? 1 + std::abs(x) : 0.0f;
            }),
      drawn("SignsOfZero", 3, 50, 11,
            [](float x, int64_t) { return std::copysign(0.0f, x); }),
      drawn("MinusInfinities", 20, 90, 40,
            [&](float x, int64_t) { return x > 0.3f ? x : -kInf; }),
      drawn("AllMinusInfinity", 3, 90, 40,
            [&](float, int64_t) { return -kInf; }),
      drawn("PlusInfinities", 20, 90, 40,
            [&](float x, int64_t) { return x > 0.5f ? kInf : x; }),
      drawn("Nans", 20, 90, 40,
            [&](float x, int64_t i) {
              return x > 0.2f ? x : i % 3 == 0 ? kNan : i % 3 == 1 ? -kInf : x;
            }),
      drawn("AllNan", 3, 20, 7, [&](float, int64_t) { return kNan; }),
      drawn("Extremes", 20, 90, 40,
            [](float x, int64_t i) {
              constexpr auto kMax = std::numeric_limits<float>::max();
              constexpr auto kMin = std::numeric_limits<float>::denorm_min();
              const float values[] = {kMax, -kMax, kMin, -kMin, 0.0f, x};
              return values[i * 7 % 6];
            }),
      // Neighbouring floats around 1.
      drawn("Neighbours", 20, 90, 13,
            [](float x, int64_t) { return 1 + std::round(x * 9) * 0x1p-23f; }),
  };
  TopKCase causal = drawn("Causal", 90, 90, 24, plain);
  for (int32_t t = 0; t < 90; ++t) {
    causal.range.emplace_back(t < 50 ? 0 : 50, t + 1);
  }
  cases.push_back(causal);
  TopKCase odd = drawn("EmptyAndInnerRanges", 6, 40, 5, plain);
  odd.range = {{0, 0}, {7, 3}, {-1, -1}, {39, 40}, {11, 14}, {3, 38}};
  cases.push_back(odd);
  return cases;
}

}  // namespace tapeline
