// Shapes that every RoPE implementation must get right.
#pragma once

#include <cstdint>
#include <vector>

namespace tapeline {

struct RopeCase {
  int64_t t, h, r;
  int64_t wider = 0;  // elements of each head that are not rotated
  bool last = true;   // the rotated ones come last in the head
};

inline std::vector<RopeCase> rope_cases() {
  return {
      {1, 1, 2},   {0, 2, 8},       {5, 3, 6},
      {16, 2, 64}, {7, 4, 64, 192}, {7, 32, 64, 64, false},
      {3, 1, 128}, {33, 5, 30, 7},  {200, 4, 40, 8},
  };
}

}  // namespace tapeline
