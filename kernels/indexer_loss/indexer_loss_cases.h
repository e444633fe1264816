// Shapes and selections that every implementation of the indexer's loss is
// tested with.
#pragma once

#include <cstdint>
#include <ostream>
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
  return cases;
}

}  // namespace tapeline
