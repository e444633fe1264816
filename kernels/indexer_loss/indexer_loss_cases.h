// Shapes and selections that every implementation of the indexer's loss is
// tested with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "kernels/sparse_attention/sparse_attention_cases.h"

namespace tapeline {

struct IndexerLossCase {
  int64_t index_heads, index_dim;
  double index_scale;
  SparseAttentionCase attention;  // its ids are the selection
};
inline std::ostream& operator<<(std::ostream& out, const IndexerLossCase& c) {
  return out << c.attention;
}

// Each query selects among all keys at random and leaves a few slots empty.
inline SparseAttentionCase select_any(SparseAttentionCase c) {
  std::mt19937 engine(static_cast<uint32_t>(c.tokens * 131 + c.selected));
  std::vector<int32_t> keys(c.keys);
  std::iota(keys.begin(), keys.end(), 0);
  for (int64_t t = 0; t < c.tokens; ++t) {
    std::shuffle(keys.begin(), keys.end(), engine);
    for (int64_t j = 0; j < c.selected; ++j) {
      c.ids.push_back(j < c.keys && engine() % 16 != 0 ? keys[j] : -1);
    }
  }
  return c;
}

inline std::vector<IndexerLossCase> indexer_loss_cases() {
  std::vector<IndexerLossCase> cases;
  for (const SparseAttentionCase& a : sparse_attention_cases()) {
    // 640 is the widest head; otherwise sizes that differ from attention's.
    if (a.name == "WidestHead") {
      cases.push_back({2, 640, 0.04, a});
    } else if (a.name == "ManyHeads") {
      cases.push_back({34, 20, 0.2, a});
    } else if (a.name == "Training") {
      cases.push_back({4, 32, 0.18, a});
    } else {
      cases.push_back({3, 7, 0.4, a});
    }
  }
  // Those of real models, by few queries: GLM-5.2, configs/mini.toml, and more
  // heads than one block of them.
  using Case = SparseAttentionCase;
  const double scale = 1 / 24.0;
  cases.push_back(
      {32, 128, 0.09,
       select_any(Case{"Glm52", 4, 1200, 64, 576, 512, 1024, scale})});
  cases.push_back({16, 128, 0.09,
                   select_any(Case{"Mini", 9, 700, 32, 576, 512, 512, scale})});
  cases.push_back(
      {64, 64, 0.125,
       select_any(Case{"TwoHeadBlocks", 5, 90, 128, 576, 512, 70, scale})});
  cases.push_back(
      {33, 64, 0.125,
       select_any(Case{"OddHeads", 7, 300, 67, 576, 8, 130, scale})});
  cases.push_back(
      {1, 128, 0.09,
       select_causal(Case{"Causal576", 100, 100, 3, 576, 8, 70, scale},
                     {1, 66, 33}, Padding::kBetween)});
  return cases;
}

}  // namespace tapeline
