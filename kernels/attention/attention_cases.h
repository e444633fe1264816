// Shapes and key ranges that every implementation of attention is tested with.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

namespace tapeline {

struct AttentionCase {
  std::string name;
  int64_t heads, groups, qk_dim, v_dim;
  int64_t keys;
  std::vector<std::pair<int32_t, int32_t>> range;  // [begin, end) per row
  double scale;
  // Multiplies the bounds of tests/support/close.h: an error of u in a score of
  // size s is one of s u in its exponential.
  double tolerance = 1;

  int64_t tokens() const { return static_cast<int64_t>(range.size()); }
};
inline std::ostream& operator<<(std::ostream& out, const AttentionCase& c) {
  return out << c.name;
}

// Causal sequences of these lengths, one after the other.
inline std::vector<std::pair<int32_t, int32_t>> packed(
    const std::vector<int32_t>& lengths) {
  std::vector<std::pair<int32_t, int32_t>> range;
  int32_t start = 0;
  for (int32_t length : lengths) {
    for (int32_t t = start; t < start + length; ++t) {
      range.emplace_back(start, t + 1);
    }
    start += length;
  }
  return range;
}

// A causal window over the last `width` keys.
inline std::vector<std::pair<int32_t, int32_t>> window(int32_t tokens,
                                                       int32_t width) {
  std::vector<std::pair<int32_t, int32_t>> range;
  for (int32_t t = 0; t < tokens; ++t) {
    range.emplace_back(t < width ? 0 : t + 1 - width, t + 1);
  }
  return range;
}

inline std::vector<AttentionCase> attention_cases() {
  return {
      {"OneToken", 1, 1, 1, 1, 1, packed({1}), 1.0},
      {"SmallOdd", 3, 1, 5, 3, 7, packed({3, 4}), 0.7},
      {"SequencesOfOne", 2, 2, 4, 6, 10, packed({1, 1, 1, 6, 1}), 0.5},
      {"Dim192Value128", 2, 2, 192, 128, 70, packed({40, 30}), 0.0721688},
      {"Dim256", 2, 1, 256, 256, 67, packed({67}), 0.0625},
      {"GroupedHeads", 8, 2, 16, 24, 133, packed({100, 1, 32}), 0.25},
      {"ThreeHeadsPerGroup", 6, 2, 20, 12, 75, packed({75}), 0.2},
      {"MoreHeadsThanATile", 66, 1, 24, 20, 5, packed({2, 3}), 0.2},
      {"WidestHead", 2, 1, 640, 640, 3, packed({3}), 0.04},
      {"DecodingWithCache",
       4,
       2,
       32,
       16,
       140,
       {{0, 138}, {0, 139}, {0, 140}},
       0.18},
      {"DecodingTwoSequences", 4, 1, 8, 8, 200, {{3, 99}, {128, 131}}, 0.35},
      {"Window", 2, 1, 8, 8, 150, window(150, 9), 0.35},
      {"ScatteredRanges",
       1,
       1,
       6,
       10,
       90,
       {{80, 90},
        {0, 90},
        {5, 5},
        {64, 65},
        {63, 66},
        {10, 3},
        {0, 64},
        {64, 90},
        {1, 2}},
       0.4},
      {"EmptyRanges",
       2,
       1,
       4,
       4,
       6,
       {{0, 0}, {2, 4}, {6, 6}, {-1, -1}, {1, 2}},
       0.5},
      {"NoKeyForAnyRow", 2, 1, 4, 4, 6, {{0, 0}, {3, 3}}, 0.5},
      {"NoKeys", 2, 1, 4, 4, 0, {{0, 0}}, 0.5},
      {"NoTokens", 2, 1, 4, 4, 6, {}, 0.5},
      // Scores in the hundreds: exp overflows unless the maximum is taken off.
      {"LargeScores", 2, 1, 16, 8, 80, packed({80}), 20.0, 200},
  };
}

}  // namespace tapeline
