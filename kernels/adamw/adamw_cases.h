// Sizes and hyperparameters that AdamW is tested with: below, at and above a
// vector and a chunk.
#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "kernels/adamw/adamw.h"

namespace tapeline {

struct AdamWCase {
  const char* name;
  int64_t elements;
  AdamWOptions options;
};

inline std::ostream& operator<<(std::ostream& out, const AdamWCase& c) {
  return out << c.name;
}

inline const std::vector<AdamWCase>& adamw_cases() {
  static const std::vector<AdamWCase> cases = {
      {"none", 0, {.lr = 1e-3}},
      {"one", 1, {.lr = 1e-3}},
      {"odd", 37, {.lr = 1e-3, .weight_decay = 0.1, .step = 2}},
      {"clipped", 64, {.lr = 1e-2, .step = 3, .gradient_scale = 0.125}},
      {"no_decay", 100, {.lr = 1e-3, .step = 1000}},
      {"late", 33, {.lr = 1e-4, .weight_decay = 0.1, .step = 100000}},
      {"other_betas",
       65,
       {.lr = 1e-3, .beta1 = 0.8, .beta2 = 0.999, .eps = 1e-6, .step = 5}},
      {"chunks", 3 * 8192 + 5, {.lr = 1e-3, .weight_decay = 0.01, .step = 7}},
  };
  return cases;
}

}  // namespace tapeline
