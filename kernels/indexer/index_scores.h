// Scores of one query with a tile of key rows: the one place where the CPU
// computes them, so that selection and loss see the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/attention/rows.h"
#include "kernels/attention/tile.h"
#include "runtime/dtype.h"
#include "runtime/view.h"

namespace tapeline::internal {

// out[j] = sum_h w[t, h] relu(scale * q[t, h] . keys[j]) for n <= kKeyTile
// keys.
template <class T, class A = Accumulator<T>>
inline void index_scores(const View<const T>& q_THD, const View<const A>& w_TH,
                         int64_t t, A scale, Rows<const A> keys, int64_t n,
                         A* out) {
  A q_buffer[kConverted<T, kRowTile>], dot_buffer[kRowTile * kKeyTile];
  const Rows<A> dot{dot_buffer, kKeyTile};
  const int64_t heads = q_THD.size(1);
  std::fill_n(out, n, A(0));
  for (int64_t h = 0; h < heads; h += kRowTile) {
    const int64_t count = std::min<int64_t>(kRowTile, heads - h);
    dots(count, n, q_THD.size(2), heads_of(q_THD, t, h, count, q_buffer), keys,
         dot);
    for (int64_t m = 0; m < count; ++m) {
      const A weight = w_TH(t, h + m);
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        const A x = dot[m][j] * scale;
        out[j] = std::fma(weight, x < 0 ? A(0) : x, out[j]);
      }
    }
  }
}

}  // namespace tapeline::internal
