#include <algorithm>

#include "kernels/combine/combine.h"
#include "kernels/combine/combine_cuda.h"
#include "kernels/cuda_dispatch.h"
#include "kernels/simd_math.h"

namespace tapeline {
namespace {

// Sums of one token are made for so many columns at a time: they stay in
// registers and L1 while the K rows stream past.
constexpr int64_t kColumns = 64;

template <class T>
void check(const View<const T>& by_row,
           const View<const Accumulator<T>>& weight,
           const View<const int32_t>& row, const View<const T>& by_token) {
  CHECK(by_token.rank() == 2 && by_row.rank() == 2 && row.rank() == 2 &&
        by_token.size(1) == by_row.size(1) && by_token.size(0) == row.size(0) &&
        weight.shape == row.shape)
      << "[combine] shapes: x is " << describe(by_row) << ", weight is "
      << describe(weight) << ", row is " << describe(row) << ", y is "
      << describe(by_token);
  CHECK(dense_rows(by_row) && dense_rows(by_token))
      << "[combine] needs dense rows: x is " << describe(by_row) << ", y is "
      << describe(by_token);
}

void check_row(int32_t r, int64_t rows) {
  CHECK(r >= -1 && r < rows) << "[combine] row " << r << " of " << rows;
}

}  // namespace

template <class T>
void combine_forward(Launch l, View<const T> x,
                     View<const Accumulator<T>> weight, View<const int32_t> row,
                     View<T> y) {
  if (l.dry) return;
  check<T>(x, weight, row, y);
  if (kCuda && l.on_cuda()) {
    return cuda::combine_forward(l, x, weight, row, y);
  }
  using A = Accumulator<T>;
  const int64_t width = y.size(1), top_k = row.size(1);
  const auto add = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t d0 = 0; d0 < width; d0 += kColumns) {
        const int64_t columns = std::min(kColumns, width - d0);
        A sum[kColumns] = {};
        for (int64_t k = 0; k < top_k; ++k) {
          const int32_t r = row(t, k);
          check_row(r, x.size(0));
          if (r < 0) continue;
          axpy(weight(t, k), &x(r, d0), sum, columns);
        }
        convert(sum, &y(t, d0), columns);
      }
    }
  };
  l.threads->parallel_for(y.size(0), rows_per_chunk(width), add);
}

template <class T>
void combine_backward(Launch l, View<const T> dy, View<const T> x,
                      View<const Accumulator<T>> weight,
                      View<const int32_t> row, View<T> dx,
                      View<Accumulator<T>> dweight) {
  if (l.dry) return;
  check<T>(x, weight, row, dy);
  check<T>(dx, dweight, row, dy);
  CHECK(dx.shape == x.shape)
      << "[combine] shapes: dx is " << describe(dx) << ", x is " << describe(x);
  if (kCuda && l.on_cuda()) {
    return cuda::combine_backward(l, dy, x, weight, row, dx, dweight);
  }
  using A = Accumulator<T>;
  const int64_t width = dy.size(1), top_k = row.size(1);
  const auto gather = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* g = &dy(t, 0);
      for (int64_t k = 0; k < top_k; ++k) {
        const int32_t r = row(t, k);
        check_row(r, x.size(0));
        dweight(t, k) = 0;
        if (r < 0) continue;
        dweight(t, k) = dot(g, &x(r, 0), width);
        const A w = weight(t, k);
        T* to = &dx(r, 0);
#pragma omp simd
        for (int64_t j = 0; j < width; ++j) store(to[j], w * load(g[j]));
      }
    }
  };
  l.threads->parallel_for(dy.size(0), rows_per_chunk(width), gather);
}

#define INSTANTIATE(T)                                                  \
  template void combine_forward(Launch, View<const T>,                  \
                                View<const Accumulator<T>>,             \
                                View<const int32_t>, View<T>);          \
  template void combine_backward(                                       \
      Launch, View<const T>, View<const T>, View<const Accumulator<T>>, \
      View<const int32_t>, View<T>, View<Accumulator<T>>)
INSTANTIATE(float);
INSTANTIATE(bf16);
INSTANTIATE(double);
#undef INSTANTIATE

}  // namespace tapeline
