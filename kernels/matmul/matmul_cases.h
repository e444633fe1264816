// Shapes and options that every matmul implementation must get right.
#pragma once

#include <vector>

#include "kernels/matmul/matmul.h"

namespace tapeline {

struct MatmulCase {
  int64_t batch;  // 0: rank 2
  int64_t m, n, k;
  MatmulOptions options;
  int64_t gap = 0;        // elements between rows of every operand
  bool shared_b = false;  // batch stride 0
};

inline std::vector<MatmulCase> matmul_cases() {
  std::vector<MatmulCase> cases;
  for (const bool ta : {false, true}) {
    for (const bool tb : {false, true}) {
      for (const bool accumulate : {false, true}) {
        const MatmulOptions o = {ta, tb, accumulate, accumulate ? 0.5 : 1};
        cases.push_back({0, 37, 29, 53, o});
        cases.push_back({0, 130, 140, 67, o, /*gap=*/3});
        cases.push_back({3, 9, 17, 5, o, /*gap=*/1});
        cases.push_back({2, 65, 33, 8, o, /*gap=*/0, /*shared_b=*/true});
        // Of those that libraries have their fastest kernels for, which must
        // not round a product to bf16 before they add it to c.
        if (accumulate) {
          cases.push_back({0, 256, 512, 384, o});
          cases.push_back({0, 256, 512, 384, o, /*gap=*/8});
          cases.push_back({5, 64, 128, 96, o});
        }
      }
    }
  }
  for (const bool accumulate : {false, true}) {
    const MatmulOptions o = {.accumulate = accumulate};
    cases.push_back({0, 1, 1, 1, o});
    cases.push_back({0, 1, 300, 64, o});  // one token
    cases.push_back({0, 300, 1, 64, o});
    cases.push_back({0, 0, 5, 7, o});
    cases.push_back({0, 5, 0, 7, o});
    cases.push_back({0, 5, 7, 0, o});  // zeros, or c unchanged
    cases.push_back({0, 3, 4, 1000, o});
    cases.push_back({0, 2, 2, 1, o, /*gap=*/5});
  }
  return cases;
}

}  // namespace tapeline
