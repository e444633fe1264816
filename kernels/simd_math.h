// Element functions and reductions that a compiler turns into vector code.
//
//   #pragma omp simd
//   for (int64_t i = 0; i < n; ++i) store(y[i], silu(load(x[i])));
//
// Element functions are branch-free straight-line code, and every fused
// multiply-add is written out, so a vector lane and a scalar tail give the same
// bits. Reductions keep kLaneBytes of partial results, element i in lane
// i % lanes, joined by halving: the order of additions is a function of the
// length alone, whatever the address, the compiler or the number of threads.
// Compile with -O3 -fopenmp-simd (the kernel() macro does).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "runtime/dtype.h"

namespace tapeline {

// --- loads and stores --------------------------------------------------------

// An element in the type that arithmetic happens in: bf16 widens to float.
inline float load(float x) { return x; }
inline double load(double x) { return x; }
inline float load(bf16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

// Rounds once to the element type: the same bits as bf16(value), without its
// branch.
inline void store(float& to, float value) { to = value; }
inline void store(double& to, double value) { to = value; }
inline void store(bf16& to, float value) {
  const uint32_t u = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = u + 0x7fffu + ((u >> 16) & 1u);
  to.bits =
      static_cast<uint16_t>((value != value ? u | 0x400000u : rounded) >> 16);
}

// to[i] = from[i], rounded once. The two do not overlap.
template <class From, class To>
inline void convert(const From* from, To* to, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    store(to[i], static_cast<Accumulator<To>>(load(from[i])));
  }
}

// --- element functions -------------------------------------------------------

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

// --- reductions --------------------------------------------------------------

// Four AVX registers: enough additions in flight to hide their latency.
inline constexpr int kLaneBytes = 128;

// lane = step(lane, i) for i = 0 .. n-1, each lane starting at `start`; then
// lanes are joined pairwise.
template <class A, class Step, class Join>
inline A lane_reduce(int64_t n, A start, Step step, Join join) {
  constexpr int kLanes = kLaneBytes / sizeof(A);
  A lane[kLanes];
  int64_t i = 0;
  if (n >= kLanes) {
#pragma omp simd
    for (int j = 0; j < kLanes; ++j) lane[j] = step(start, j);
    i = kLanes;
  } else {
    for (int j = 0; j < kLanes; ++j) lane[j] = start;
  }
  for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
    for (int j = 0; j < kLanes; ++j) lane[j] = step(lane[j], i + j);
  }
  for (int64_t j = 0; i + j < n; ++j) lane[j] = step(lane[j], i + j);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) lane[j] = join(lane[j], lane[j + width]);
  }
  return lane[0];
}

// Sum of term(i) over [0, n).
template <class A, class Term>
inline A lane_sum(int64_t n, Term term) {
  return lane_reduce(
      n, A(0), [&](A lane, int64_t i) { return lane + term(i); },
      [](A a, A b) { return a + b; });
}

template <class T>
inline Accumulator<T> sum(const T* x, int64_t n) {
  return lane_sum<Accumulator<T>>(n, [x](int64_t i) { return load(x[i]); });
}

namespace internal {

// One AVX register of float or double.
template <class A>
struct Register {
  static constexpr int kWidth = 32 / sizeof(A);
  typedef A Type __attribute__((vector_size(32)));
};

// kWidth elements from x on.
inline Register<float>::Type load_register(const float* x) {
  Register<float>::Type out;
  std::memcpy(&out, x, sizeof out);
  return out;
}
inline Register<double>::Type load_register(const double* x) {
  Register<double>::Type out;
  std::memcpy(&out, x, sizeof out);
  return out;
}
inline Register<float>::Type load_register(const bf16* x) {
  typedef uint16_t Half __attribute__((vector_size(16)));
  typedef uint32_t Word __attribute__((vector_size(32)));
  Half half;
  std::memcpy(&half, x, sizeof half);
  const Word word = __builtin_convertvector(half, Word) << 16;
  Register<float>::Type out;
  std::memcpy(&out, &word, sizeof out);
  return out;
}
}  // namespace internal

// Sum of a[i] * b[i], each product rounded: lane_sum's order, with the lanes
// spelled out as registers, which compilers do not find for so short a loop as
// an attention head.
template <class T, class U>
inline Accumulator<T> dot(const T* a, const U* b, int64_t n) {
  using A = Accumulator<T>;
  using Register = internal::Register<A>;
  constexpr int kWidth = Register::kWidth;
  // Four names, since compilers keep an array of registers in memory.
  typename Register::Type p{}, q{}, r{}, s{};
  const auto product = [](const T* x, const U* y) {
    return internal::load_register(x) * internal::load_register(y);
  };
  for (; n >= 4 * kWidth; a += 4 * kWidth, b += 4 * kWidth, n -= 4 * kWidth) {
    p += product(a, b);
    q += product(a + kWidth, b + kWidth);
    r += product(a + 2 * kWidth, b + 2 * kWidth);
    s += product(a + 3 * kWidth, b + 3 * kWidth);
  }
  if (n >= kWidth) p += product(a, b);
  if (n >= 2 * kWidth) q += product(a + kWidth, b + kWidth);
  if (n >= 3 * kWidth) r += product(a + 2 * kWidth, b + 2 * kWidth);
  if (const int64_t rest = n % kWidth; rest > 0) {
    T x[kWidth] = {};
    U y[kWidth] = {};
    std::copy(a + n - rest, a + n, x);
    std::copy(b + n - rest, b + n, y);
    const typename Register::Type last = product(x, y);
    if (n < kWidth)
      p += last;
    else if (n < 2 * kWidth)
      q += last;
    else if (n < 3 * kWidth)
      r += last;
    else
      s += last;
  }
  const typename Register::Type total = (p + r) + (q + s);
  A part[kWidth];
  std::memcpy(part, &total, sizeof part);
  for (int width = kWidth / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) part[j] += part[j + width];
  }
  return part[0];
}

// The largest element; -inf for n = 0. NaNs lose every comparison.
template <class T>
inline Accumulator<T> max_of(const T* x, int64_t n) {
  using A = Accumulator<T>;
  return lane_reduce(
      n, -std::numeric_limits<A>::infinity(),
      [x](A lane, int64_t i) {
        const A v = load(x[i]);
        return v > lane ? v : lane;
      },
      [](A a, A b) { return b > a ? b : a; });
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
