// Shapes and key ranges that every implementation of the indexer is tested
// with.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/attention_cases.h"

namespace tapeline {

struct IndexerCase {
  std::string name;
  int64_t heads, dim, keys;
  int selected;
  std::vector<std::pair<int32_t, int32_t>> range;
  double scale;

  int64_t tokens() const { return static_cast<int64_t>(range.size()); }
};
inline std::ostream& operator<<(std::ostream& out, const IndexerCase& c) {
  return out << c.name;
}

inline std::vector<IndexerCase> indexer_cases() {
  return {
      {"OneToken", 1, 1, 1, 1, packed({1}), 1.0},
      {"SmallOdd", 3, 5, 7, 2, packed({3, 4}), 0.7},
      {"SequencesOfOne", 2, 6, 9, 3, packed({1, 1, 6, 1}), 0.5},
      {"MoreSlotsThanKeys", 2, 10, 20, 33, packed({20}), 0.3},
      // More rows than the workspace holds, more than one tile of keys.
      {"Training", 4, 32, 300, 64, packed({170, 130}), 0.18},
      {"ManyHeads", 35, 24, 12, 4, packed({12}), 0.2},
      {"WidestHead", 2, 640, 5, 3, packed({5}), 0.04},
      {"DecodingWithCache",
       4,
       16,
       200,
       16,
       {{0, 198}, {0, 199}, {0, 200}},
       0.25},
      {"Window", 2, 8, 150, 5, window(150, 9), 0.35},
      {"EmptyRanges",
       2,
       4,
       6,
       3,
       {{0, 0}, {2, 4}, {6, 6}, {-1, -1}, {5, 2}, {0, 6}},
       0.5},
      {"NoKeys", 2, 4, 0, 3, {{0, 0}}, 0.5},
      {"NoTokens", 2, 4, 6, 3, {}, 0.5},
      {"NothingSelected", 2, 4, 6, 0, packed({6}), 0.5},
  };
}

}  // namespace tapeline
