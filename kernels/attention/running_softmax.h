// Softmax of one row whose scores come in tiles (Milakov & Gimelshein 2018).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/simd_math.h"

namespace tapeline::internal {

template <class A>
class RunningSoftmax {
 public:
  // Turns n raw scores into exp(scale * x - max) under the largest score so
  // far; returns the factor that brings what was summed before to this maximum.
  A add(A* x, int64_t n, A scale) {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) x[j] *= scale;
    const A max = std::max(max_, max_of(x, n));
    const A shrink = exp_simd(max_ - max);
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) x[j] = exp_simd(x[j] - max);
    total_ = std::fma(total_, shrink, sum(x, n));
    max_ = max;
    return shrink;
  }

  // What the sum of exp(score - max) times value must be multiplied with: 0 for
  // a row without scores.
  A inverse() const { return empty() ? A(0) : A(1) / total_; }
  // log sum exp, natural; +inf for a row without scores.
  A lse() const {
    return empty() ? std::numeric_limits<A>::infinity()
                   : max_ + std::log(total_);
  }

 private:
  bool empty() const { return total_ == 0; }

  A max_ = -std::numeric_limits<A>::infinity();
  A total_ = 0;  // at least 1 after the first score
};

}  // namespace tapeline::internal
