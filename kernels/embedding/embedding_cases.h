// Tables and ids that every embedding implementation must get right.
#pragma once

#include <cstdint>
#include <vector>

namespace tapeline {

struct EmbeddingCase {
  std::vector<double> ids;
  int64_t v, d;
  int64_t padding_id = -1;
  int64_t gap = 0;  // elements between rows
};

inline std::vector<EmbeddingCase> embedding_cases() {
  std::vector<double> many;
  for (int t = 0; t < 500; ++t) many.push_back((t * t + 3 * t) % 11);
  // Enough for a GPU to link them by id: ids of one token, of some and of more
  // than a thousand.
  std::vector<double> words;
  for (int t = 0; t < 9001; ++t) {
    const int draw = t * 7919 % 9001;
    words.push_back(draw % 3 == 0 ? 1000 + draw : draw % 7 * (draw % 29));
  }
  return {
      {{}, 4, 8},
      {{3}, 4, 33},
      {{0, 1, 2, 3}, 4, 7},
      {{2, 2, 2, 2, 2}, 4, 16},         // one id alone
      {{0, 5, 0, 1, 5, 0}, 6, 100, 0},  // the first row is padding
      {{0, 5, 0, 1, 5, 0}, 6, 100, 5, 3},
      {{1, 1, 1}, 2, 5, 1},  // nothing but padding
      {many, 11, 129, 4, 1},
      {words, 10001, 24},
      {words, 10007, 9, 6, 3},
      {std::vector<double>(2100, 1), 2, 264},  // one id alone
  };
}

}  // namespace tapeline
