// Elements in and out of arithmetic: bf16 widens to float, results round once.
#pragma once

#include <bit>
#include <cstdint>

#include "runtime/dtype.h"

namespace tapeline {

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

}  // namespace tapeline
