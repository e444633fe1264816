// Batches that the auxiliary losses are tested with.
#pragma once

#include <cstdint>
#include <ostream>
#include <random>
#include <vector>

#include "kernels/aux_loss/aux_loss.h"

namespace tapeline {

struct AuxLossCase {
  const char* name;
  int64_t experts, top_k;
  std::vector<int32_t> starts;  // of sequences, then the number of tokens
  enum Padding { kNone, kSome, kLastSequence, kAll } padding;
};

inline std::ostream& operator<<(std::ostream& out, const AuxLossCase& c) {
  return out << c.name;
}

inline const std::vector<AuxLossCase>& aux_loss_cases() {
  static const std::vector<AuxLossCase> cases = {
      {"one_sequence", 8, 2, {0, 24}, AuxLossCase::kNone},
      {"two_sequences", 8, 2, {0, 9, 24}, AuxLossCase::kNone},
      {"odd", 5, 3, {0, 1, 2, 11}, AuxLossCase::kSome},
      {"padding_sequence", 8, 2, {0, 7, 12, 20}, AuxLossCase::kLastSequence},
      {"empty_sequence", 4, 1, {0, 5, 5, 9}, AuxLossCase::kSome},
      {"all_padding", 6, 2, {0, 3, 8}, AuxLossCase::kAll},
      {"no_token", 6, 2, {0, 0}, AuxLossCase::kNone},
      {"one_token", 3, 1, {0, 1}, AuxLossCase::kNone},
      {"one_expert", 1, 1, {0, 6}, AuxLossCase::kNone},
      {"wide", 70, 4, {0, 2, 5}, AuxLossCase::kSome},
  };
  return cases;
}

inline std::vector<uint8_t> valid_of(const AuxLossCase& c) {
  const int64_t tokens = c.starts.back();
  const int64_t last = c.starts[c.starts.size() - 2];
  std::vector<uint8_t> valid(tokens, 1);
  for (int64_t t = 0; t < tokens; ++t) {
    switch (c.padding) {
      case AuxLossCase::kNone:
        break;
      case AuxLossCase::kSome:
        valid[t] = t % 3 != 1;
        break;
      case AuxLossCase::kLastSequence:
        valid[t] = t < last;
        break;
      case AuxLossCase::kAll:
        valid[t] = 0;
        break;
    }
  }
  return valid;
}

// Distinct experts per token, skewed to the low ones.
inline std::vector<int32_t> expert_ids_of(const AuxLossCase& c) {
  std::mt19937 random(11);
  std::vector<int32_t> ids;
  for (int32_t t = 0; t < c.starts.back(); ++t) {
    std::vector<int32_t> left;
    for (int32_t e = 0; e < c.experts; ++e) left.push_back(e);
    for (int64_t k = 0; k < c.top_k; ++k) {
      const size_t i = std::min(random() % left.size(), random() % left.size());
      ids.push_back(left[i]);
      left.erase(left.begin() + static_cast<int64_t>(i));
    }
  }
  return ids;
}

}  // namespace tapeline
