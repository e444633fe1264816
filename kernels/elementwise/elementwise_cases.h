// Shapes that every elementwise implementation must get right.
#pragma once

#include <vector>

#include "runtime/shape.h"

namespace tapeline {

struct ElementwiseCase {
  Shape shape;
  int64_t gap_x, gap_y;  // elements between rows of an input, of the output
};

inline std::vector<ElementwiseCase> elementwise_cases() {
  return {
      {{1}, 0, 0},          {{7}, 0, 0},          {{0}, 0, 0},
      {{3, 0}, 0, 0},       {{100003}, 0, 0},     {{64, 128}, 0, 0},
      {{33, 129}, 5, 0},    {{33, 129}, 0, 7},    {{2, 3, 65}, 1, 2},
      {{3, 2, 5, 9}, 3, 0}, {{1, 1, 1, 1}, 0, 0}, {{2000, 3}, 1, 1},
      {{5, 40000}, 8, 8},
  };
}

}  // namespace tapeline
