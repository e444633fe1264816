// Row-major working memory of the CPU kernels of attention and the indexer.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/attention/limits.h"
#include "kernels/simd_math.h"
#include "runtime/dtype.h"
#include "runtime/view.h"

namespace tapeline::internal {

// Sizes of the working sets that CPU kernels keep on the stack: a tile of keys
// or rows of the widest head in f64 is 320 KiB.
inline constexpr int kKeyTile = 64;
inline constexpr int kRowTile = 32;

// Row-major memory: rows `stride` elements apart.
template <class A>
struct Rows {
  A* data;
  int64_t stride;
  A* operator[](int64_t i) const { return data + i * stride; }
  Rows from(int64_t row, int64_t column = 0) const {
    return {data + row * stride + column, stride};
  }
  operator Rows<const A>() const requires(!std::is_const_v<A>) {
    return {data, stride};
  }
};

// A factor that may be read transposed.
template <class A>
struct Factor {
  const A* data;
  int64_t row, column;  // strides
  const A& operator()(int64_t m, int64_t k) const {
    return data[m * row + k * column];
  }
  Factor from(int64_t m, int64_t k) const {
    return {&(*this)(m, k), row, column};
  }
};
template <class A>
Factor<std::remove_const_t<A>> plain(Rows<A> rows) {
  return {rows.data, rows.stride, 1};
}
template <class A>
Factor<std::remove_const_t<A>> transposed(Rows<A> rows) {
  return {rows.data, 1, rows.stride};
}

// Rows in the accumulator's type: the memory itself when it has that type, else
// a converted copy in `buffer`, which holds kConverted<T, number of rows>.
template <class T, int kRows>
inline constexpr int kConverted =
    std::is_same_v<T, Accumulator<T>> ? 1 : kRows* kMaxHeadDim;
template <class T>
inline Rows<const Accumulator<T>> converted(Rows<const T> from, int64_t rows,
                                            int64_t n, Accumulator<T>* buffer) {
  if constexpr (std::is_same_v<T, Accumulator<T>>) {
    return from;
  } else {
    for (int64_t i = 0; i < rows; ++i) convert(from[i], buffer + i * n, n);
    return {buffer, n};
  }
}

// Heads [h, h + n) of row t of x [T, H, D] in the accumulator's type; `buffer`
// holds kConverted<T, kRowTile>.
template <class T>
inline Rows<const Accumulator<T>> heads_of(const View<const T>& x_THD,
                                           int64_t t, int64_t h, int64_t n,
                                           Accumulator<T>* buffer) {
  const T* from = x_THD.data + t * x_THD.strides[0] + h * x_THD.strides[1];
  return converted<T>({from, x_THD.strides[1]}, n, x_THD.size(2), buffer);
}

}  // namespace tapeline::internal
