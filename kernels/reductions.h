// Sums, dot products and maxima in a fixed order, as vector code.
//
// There are kLaneBytes of partial results; element i goes to lane i % lanes,
// and lanes are joined by halving. The order of additions is a function of the
// length alone, whatever the address, the compiler or the number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/element.h"
#include "runtime/dtype.h"

namespace tapeline {

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

}  // namespace tapeline
