// Shapes that every implementation of a norm over rows must get right.
#pragma once

#include <cstdint>
#include <vector>

namespace tapeline {

struct RmsNormCase {
  int64_t n, d;
  int64_t gap = 0;  // elements between rows
  float eps = 1e-5f;
  float scale = 1;  // of x: small rows make eps count
};

inline std::vector<RmsNormCase> rms_norm_cases() {
  return {
      {1, 128},
      {0, 16},
      {5, 2},
      {7, 31},
      {33, 128, 3},
      {64, 512},
      {3, 1000, 1},
      {2, 7168},
      {9, 64, 0, 1e-6f},
      {9, 64, 0, 1e-5f, 1e-3f},
      {300, 20, 12},
      // Rows of whole packs, of every length that is walked in its own way.
      {1100, 64, 8},
      {200, 256},
      {70, 512, 16},
      {40, 1024},
      {1100, 2048, 8},
      {23, 4096},
      {5, 6144},
      {3, 16392},
  };
}

}  // namespace tapeline
