// Element functions that a compiler turns into vector code.
//
//   #pragma omp simd
//   for (int64_t i = 0; i < n; ++i) store(y[i], silu(load(x[i])));
//
// They are branch-free straight-line code, and every fused multiply-add is
// written out, so a vector lane and a scalar tail give the same bits.
// Compile with -O3 -fopenmp-simd (the kernel() macro does).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/element.h"
#include "kernels/reductions.h"
#include "runtime/dtype.h"

namespace tapeline {

// exp(x), within 1 ulp where the result is normal, rounded correctly to within
// 1 subnormal step below that; exactly 0 for x <= -104 (so for -inf), inf from
// 88.73 on; NaN stays NaN.
inline float exp_simd(float x) {
  // exp(-104) is below half the smallest subnormal and exp(89) above the
  // largest float. Comparisons are false for NaN, which passes through.
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  // x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 leaves n, rounded to
  // nearest, in the low bits of the sum.
  constexpr float kShift = 0x1.8p23f;
  const float shifted = std::fma(x, 0x1.715476p0f, kShift);
  const float n = shifted - kShift;
  float r = std::fma(n, -0x1.62e430p-1f, x);  // exact: ln 2 rounded to float
  r = std::fma(n, 0x1.05c610p-29f, r);        // what that rounding added
  // (exp(r) - 1 - r) / r^2, interpolated at five Chebyshev nodes: relative
  // error of exp(r) 1.1e-8, a sixth of an ulp.
  float p = 1.3926183e-3f;
  p = std::fma(p, r, 8.3631791e-3f);
  p = std::fma(p, r, 4.1666555e-2f);
  p = std::fma(p, r, 1.6666577e-1f);
  p = std::fma(p, r, 0.5f);
  p = std::fma(p * r, r, r) + 1.0f;
  // 2^n in two factors, as n reaches -150 and 128. The first product is exact,
  // so only one rounding happens, in the second.
  const int32_t k = static_cast<int32_t>(std::bit_cast<uint32_t>(shifted) -
                                         std::bit_cast<uint32_t>(kShift));
  const int32_t half = k >> 1;
  const float a = std::bit_cast<float>(static_cast<uint32_t>(half + 127) << 23);
  const float b =
      std::bit_cast<float>(static_cast<uint32_t>(k - half + 127) << 23);
  return p * a * b;
}
// f64 is for checks of gradients, where speed does not matter.
inline double exp_simd(double x) { return std::exp(x); }

// 1 / (1 + exp(-x))
template <class A>
inline A sigmoid(A x) {
  return A(1) / (A(1) + exp_simd(-x));
}

// x / (1 + exp(-x)); NaN at -inf, as the formula has it.
template <class A>
inline A silu(A x) {
  return x / (A(1) + exp_simd(-x));
}

// y[i] += alpha * x[i], fused, rounded once to Y.
template <class X, class Y>
inline void axpy(Accumulator<Y> alpha, const X* x, Y* y, int64_t n) {
  using A = Accumulator<Y>;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    store(y[i], std::fma(alpha, A(load(x[i])), A(load(y[i]))));
  }
}

}  // namespace tapeline
