// The loop nest of operands of one shape and different strides.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "runtime/shape.h"

namespace tapeline::internal {

// The same loop nest for N operands, with as few and as long dimensions as
// their strides allow. The last dimension is the inner loop.
template <int N>
struct Nest {
  Shape shape;
  std::array<Shape, N> strides;

  // May dimension d be joined with d + 1? Then one index walks both.
  bool joined(int d) const {
    for (const Shape& s : strides) {
      if (s[d] != s[d + 1] * shape[d + 1]) return false;
    }
    return true;
  }
  int64_t inner() const { return shape[-1]; }
  int64_t rows() const {
    return shape.elements() / std::max<int64_t>(1, inner());
  }

  // Where row `row` begins in each operand.
  std::array<int64_t, N> offsets(int64_t row) const {
    std::array<int64_t, N> at{};
    for (int d = shape.rank() - 2; d >= 0; --d) {
      const int64_t index = row % shape[d];
      row /= shape[d];
      for (int k = 0; k < N; ++k) at[k] += index * strides[k][d];
    }
    return at;
  }
};

template <int N>
Nest<N> nest(const Shape& shape, const std::array<Shape, N>& strides) {
  // Dimensions of one element have no stride to speak of.
  Nest<N> all;
  for (int d = 0; d < shape.rank(); ++d) {
    if (shape[d] == 1) continue;
    all.shape.push_back(shape[d]);
    for (int k = 0; k < N; ++k) all.strides[k].push_back(strides[k][d]);
  }
  Nest<N> out;
  for (int d = 0; d < all.shape.rank(); ++d) {
    if (d > 0 && all.joined(d - 1)) {
      out.shape[-1] *= all.shape[d];
      for (int k = 0; k < N; ++k) out.strides[k][-1] = all.strides[k][d];
    } else {
      out.shape.push_back(all.shape[d]);
      for (int k = 0; k < N; ++k) out.strides[k].push_back(all.strides[k][d]);
    }
  }
  if (out.shape.rank() == 0) {  // a single element
    out.shape.push_back(shape.elements());
    for (int k = 0; k < N; ++k) out.strides[k].push_back(1);
  }
  return out;
}

}  // namespace tapeline::internal
