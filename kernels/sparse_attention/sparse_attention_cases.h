// Shapes and selections that every implementation of sparse attention is tested
// with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace tapeline {

struct SparseAttentionCase {
  std::string name;
  int64_t tokens, keys, heads, dim, v_dim, selected;
  double scale;
  std::vector<int32_t> ids = {};  // [tokens, selected]
};
inline std::ostream& operator<<(std::ostream& out,
                                const SparseAttentionCase& c) {
  return out << c.name;
}

// What fills the rest of a row behind or between its valid ids.
enum class Padding { kBehind, kBetween };

// Each query selects from its own sequence up to itself; lengths add up to
// tokens. Ids are in random order.
inline SparseAttentionCase select_causal(SparseAttentionCase c,
                                         const std::vector<int32_t>& lengths,
                                         Padding padding = Padding::kBehind) {
  std::mt19937 engine(static_cast<uint32_t>(c.tokens * 131 + c.selected));
  int32_t start = 0;
  for (int32_t length : lengths) {
    for (int32_t t = start; t < start + length; ++t) {
      std::vector<int32_t> row;
      for (int32_t s = start; s <= t; ++s) row.push_back(s);
      std::shuffle(row.begin(), row.end(), engine);
      const bool between = padding == Padding::kBetween;
      row.resize(
          std::min<size_t>(row.size(), c.selected - c.selected / 3 * between));
      row.resize(c.selected, -1);
      if (between) std::shuffle(row.begin(), row.end(), engine);
      c.ids.insert(c.ids.end(), row.begin(), row.end());
    }
    start += length;
  }
  return c;
}

inline std::vector<SparseAttentionCase> sparse_attention_cases() {
  using Case = SparseAttentionCase;
  std::vector<Case> cases = {
      select_causal(Case{"OneToken", 1, 1, 1, 1, 1, 1, 1.0}, {1}),
      select_causal(Case{"SmallOdd", 7, 7, 3, 5, 3, 4, 0.7}, {3, 4}),
      select_causal(Case{"SequencesOfOne", 9, 9, 2, 6, 6, 3, 0.5},
                    {1, 1, 6, 1}),
      select_causal(Case{"MoreSlotsThanKeys", 20, 20, 2, 10, 7, 33, 0.3}, {20}),
      select_causal(Case{"PaddingBetween", 110, 110, 4, 12, 9, 100, 0.3},
                    {85, 25}, Padding::kBetween),
      // Training on a small machine: H 4, D 80, V 64, K 64.
      select_causal(Case{"Training", 150, 150, 4, 80, 64, 64, 0.11}, {100, 50}),
      // More than one tile of keys, more heads than one block.
      select_causal(Case{"ManyKeys", 140, 140, 2, 16, 8, 130, 0.25}, {140}),
      select_causal(Case{"ManyHeads", 6, 6, 35, 24, 20, 4, 0.2}, {6}),
      select_causal(Case{"Absorbed576", 12, 12, 3, 576, 512, 8, 0.0625}, {12}),
      select_causal(Case{"WidestHead", 3, 3, 2, 640, 640, 3, 0.04}, {3}),
      {"NothingSelected",
       3,
       4,
       2,
       5,
       4,
       3,
       0.5,
       {-1, -1, -1, -1, -1, -1, -1, -1, -1}},
      {"SomeRowsEmpty",
       4,
       6,
       2,
       5,
       4,
       3,
       0.5,
       {-1, -1, -1, 5, -1, 0, -1, -1, -1, -1, 3, 0}},
      // Later keys, keys of a cache, an id twice.
      {"AnyKeys", 2, 9, 2, 5, 4, 4, 0.5, {8, 0, 8, 4, 3, -1, 3, 3}},
      {"NoSlots", 2, 3, 2, 5, 4, 0, 0.5, {}},
      {"NoTokens", 0, 3, 2, 5, 4, 4, 0.5, {}},
      {"NoKeys", 2, 0, 2, 5, 4, 2, 0.5, {-1, -1, -1, -1}},
  };
  return cases;
}

}  // namespace tapeline
