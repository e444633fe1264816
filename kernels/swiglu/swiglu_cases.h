// Shapes that every SwiGLU implementation must get right.
#pragma once

#include <cstdint>
#include <vector>

namespace tapeline {

struct SwigluCase {
  int64_t rows, f;
  int64_t used;        // rows that the count covers; -1: no count given
  bool fused = false;  // gate and up are halves of one tensor
  float scale = 1;     // of gate: 40 saturates the sigmoid
};

inline std::vector<SwigluCase> swiglu_cases() {
  return {
      {1, 48, -1},
      {0, 16, -1},
      {7, 1, -1},
      {33, 129, -1},
      {64, 512, -1},
      {9, 40, -1, true},
      {9, 40, 5, true},
      {9, 40, 0},
      {9, 40, 9},
      {128, 31, 77, true},
      {16, 64, -1, false, 40},
  };
}

}  // namespace tapeline
