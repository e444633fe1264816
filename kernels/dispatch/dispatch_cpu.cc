#include <algorithm>

#include "kernels/cuda_dispatch.h"
#include "kernels/dispatch/dispatch.h"
#include "kernels/dispatch/dispatch_cuda.h"
#include "kernels/simd_math.h"

namespace tapeline {
namespace {

// Sums of one token are made for so many columns at a time: they stay in
// registers and L1 while the K rows stream past.
constexpr int64_t kColumns = 64;

template <class T>
void check(const View<const T>& by_token, const View<const int32_t>& row,
           const View<const T>& by_row) {
  CHECK(by_token.rank() == 2 && by_row.rank() == 2 && row.rank() == 2 &&
        by_token.size(1) == by_row.size(1) && by_token.size(0) == row.size(0))
      << "[dispatch] shapes: x is " << describe(by_token) << ", row is "
      << describe(row) << ", routed x is " << describe(by_row);
  CHECK(dense_rows(by_token) && dense_rows(by_row))
      << "[dispatch] needs dense rows: x is " << describe(by_token)
      << ", routed x is " << describe(by_row);
}

void check_row(int32_t r, int64_t rows) {
  CHECK(r >= -1 && r < rows) << "[dispatch] row " << r << " of " << rows;
}

}  // namespace

template <class T>
void dispatch_forward(Launch l, View<const T> x, View<const int32_t> row,
                      View<T> x_routed) {
  if (l.dry) return;
  check<T>(x, row, x_routed);
  if (kCuda && l.on_cuda()) {
    return cuda::dispatch_forward(l, x, row, x_routed);
  }
  const int64_t width = x.size(1), top_k = row.size(1);
  const auto copy = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t k = 0; k < top_k; ++k) {
        const int32_t r = row(t, k);
        check_row(r, x_routed.size(0));
        if (r < 0) continue;
        std::copy_n(&x(t, 0), width, &x_routed(r, 0));
      }
    }
  };
  l.threads->parallel_for(x.size(0), rows_per_chunk(width), copy);
}

template <class T>
void dispatch_backward(Launch l, View<const T> dx_routed,
                       View<const int32_t> row, View<T> dx) {
  if (l.dry) return;
  check<T>(dx, row, dx_routed);
  if (kCuda && l.on_cuda()) {
    return cuda::dispatch_backward(l, dx_routed, row, dx);
  }
  using A = Accumulator<T>;
  const int64_t width = dx.size(1), top_k = row.size(1);
  const auto add = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t d0 = 0; d0 < width; d0 += kColumns) {
        const int64_t columns = std::min(kColumns, width - d0);
        A sum[kColumns] = {};
        for (int64_t k = 0; k < top_k; ++k) {
          const int32_t r = row(t, k);
          check_row(r, dx_routed.size(0));
          if (r < 0) continue;
          const T* from = &dx_routed(r, d0);
#pragma omp simd
          for (int64_t j = 0; j < columns; ++j) sum[j] += load(from[j]);
        }
        convert(sum, &dx(t, d0), columns);
      }
    }
  };
  l.threads->parallel_for(dx.size(0), rows_per_chunk(width), add);
}

#define INSTANTIATE(T)                                                        \
  template void dispatch_forward(Launch, View<const T>, View<const int32_t>,  \
                                 View<T>);                                    \
  template void dispatch_backward(Launch, View<const T>, View<const int32_t>, \
                                  View<T>)
INSTANTIATE(float);
INSTANTIATE(bf16);
INSTANTIATE(double);
#undef INSTANTIATE

}  // namespace tapeline
