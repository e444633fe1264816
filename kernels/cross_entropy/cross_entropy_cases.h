// Vocabularies and label patterns that cross-entropy is tested with.
#pragma once

#include <cstdint>
#include <ostream>
#include <random>
#include <vector>

#include "kernels/cross_entropy/cross_entropy.h"

namespace tapeline {

enum class Labels { kAll, kSome, kNone };  // how many tokens have one

struct CrossEntropyCase {
  const char* name;
  int64_t tokens, vocabulary;
  Labels labels;
  float spread;     // standard deviation of the logits
  int64_t gap = 3;  // elements between rows; of 0 and 8 rows are whole packs
};

inline std::ostream& operator<<(std::ostream& out, const CrossEntropyCase& c) {
  return out << c.name;
}

inline const std::vector<CrossEntropyCase>& cross_entropy_cases() {
  static const std::vector<CrossEntropyCase> cases = {
      {"bytes", 33, 256, Labels::kSome, 2},
      {"odd", 7, 97, Labels::kSome, 2},
      {"one_token", 1, 64, Labels::kAll, 1},
      {"no_token", 0, 64, Labels::kAll, 1},
      {"no_label", 6, 40, Labels::kNone, 1},
      {"one_class", 5, 1, Labels::kAll, 1},
      {"two_classes", 5, 2, Labels::kSome, 1},
      {"large_logits", 9, 130, Labels::kSome, 1000},
      {"large_vocabulary", 3, 154880, Labels::kAll, 3},
      {"rows_of_packs", 5, 256, Labels::kSome, 2, 0},
      {"packs_of_glm", 2, 154880, Labels::kSome, 3, 0},
      {"packs_of_qwen", 3, 151936, Labels::kSome, 20, 0},
      // The ends of cross_entropy_plan()'s envelope, and one beyond.
      {"fewest_packs", 3, 81928, Labels::kSome, 3, 0},
      {"most_packs", 3, 163840, Labels::kSome, 3, 0},
      {"too_many_packs", 1, 163848, Labels::kAll, 3, 0},
      {"packs_apart", 3, 151936, Labels::kAll, 3, 8},
  };
  return cases;
}

// Labels of the first and last class among them.
inline std::vector<int32_t> labels_of(const CrossEntropyCase& c) {
  std::mt19937 random(7);
  std::vector<int32_t> out;
  for (int64_t t = 0; t < c.tokens; ++t) {
    int32_t label = static_cast<int32_t>(random() % c.vocabulary);
    if (t == 0) label = 0;
    if (t == c.tokens - 1) label = static_cast<int32_t>(c.vocabulary - 1);
    const bool ignored =
        c.labels == Labels::kNone || (c.labels == Labels::kSome && t % 3 == 1);
    out.push_back(ignored ? kIgnoredLabel : label);
  }
  return out;
}

}  // namespace tapeline
