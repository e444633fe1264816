// Counts per expert that every grouped matmul must get right.
#pragma once

#include <cstdint>
#include <vector>

namespace tapeline {

struct GroupedMatmulCase {
  std::vector<int32_t> counts;  // rows of each expert
  int64_t spare;                // rows of capacity behind the last expert
  int64_t d, f;
  int64_t gap = 0;    // elements between rows
  int32_t first = 0;  // rows of capacity before the first expert
};

inline std::vector<GroupedMatmulCase> grouped_matmul_cases() {
  // Tiles for a GPU's clusters three times over, and more experts than it puts
  // in order.
  std::vector<int32_t> several, many;
  for (int e = 0; e < 150; ++e) several.push_back(e * 7 % 19);
  for (int e = 0; e < 1027; ++e) many.push_back(e % 3);
  return {
      {{3, 5, 2, 7}, 0, 16, 24},
      {{0, 5, 2, 7}, 3, 16, 24},      // first empty
      {{3, 0, 0, 7}, 3, 16, 24},      // middle empty
      {{3, 5, 2, 0}, 4, 16, 24},      // last empty
      {{0, 0, 0, 0}, 5, 16, 24},      // all empty
      {{0, 0, 0}, 0, 8, 8},           // no row at all
      {{5, 9}, 2, 16, 16},            // w[e] and its transpose look alike
      {{1, 1, 1}, 1, 33, 17},         // one token each
      {{0, 1, 0, 0}, 0, 5, 3, 2},     // one token in all
      {{127, 128, 129}, 9, 40, 20},   // around the tile
      {{300, 1, 77}, 2, 21, 530, 3},  // more columns than a tile
      {{2, 260}, 2, 515, 33, 1},
      {{4, 6}, 3, 12, 10, 0, 5},  // rows before the first expert
      // What tensor cores take on CUDA (bf16), with ragged tiles either way.
      {{130, 0, 65, 1}, 3, 200, 264},
      {{200, 0, 70}, 5, 256, 384, 8, 2},
      {several, 2, 24, 16},
      {many, 0, 16, 8},
  };
}

}  // namespace tapeline
