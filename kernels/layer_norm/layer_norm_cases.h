// Shapes that every layer norm implementation must get right.
#pragma once

#include <cstdint>
#include <vector>

namespace tapeline {

struct LayerNormCase {
  int64_t n, d;
  int64_t gap = 0;  // elements between rows
  float eps = 1e-6f;
  float scale = 1;  // of x: small rows make eps count
};

inline std::vector<LayerNormCase> layer_norm_cases() {
  return {
      {1, 128},
      {0, 16},
      {7, 31},
      {33, 128, 3},
      {64, 512},
      {3, 1000, 1},
      {2, 5000},
      {9, 64, 0, 1e-5f},
      {9, 64, 0, 1e-6f, 1e-3f},
      {300, 20, 12},
      // Rows of whole packs, of every length that is walked in its own way.
      {1100, 64, 8},
      {2200, 128},
      {200, 256, 8},
      {70, 512, 16},
      {23, 2048},
      {5, 4096},
      {3, 8200},
  };
}

}  // namespace tapeline
