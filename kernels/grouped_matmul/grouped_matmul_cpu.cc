#include "kernels/cuda_dispatch.h"
#include "kernels/grouped_matmul/grouped_matmul.h"
#include "kernels/grouped_matmul/grouped_matmul_cuda.h"
#include "kernels/matmul/gemm_tile.h"

namespace tapeline {
namespace {

// As in matmul: halves of 128 x 512 lose 15 % to BLAS's packing, quarters more.
constexpr int64_t kTileRows = 128;
constexpr int64_t kTileColumns = 512;

template <class T>
bool blas_rows(const View<T>& x) {
  return dense_rows(x) && (x.size(-2) <= 1 || x.strides[-2] >= x.size(-1));
}

// rows_D [R, D] and rows_F [R, F] around w [E, F, D].
template <class X, class Y, class W>
void check(const char* op, const View<X>& rows_D, const View<Y>& rows_F,
           const View<W>& w, const View<const int32_t>& offsets) {
  CHECK(rows_D.rank() == 2 && rows_F.rank() == 2 && w.rank() == 3 &&
        offsets.rank() == 1 && rows_D.size(0) == rows_F.size(0) &&
        rows_D.size(1) == w.size(2) && rows_F.size(1) == w.size(1) &&
        offsets.size(0) == w.size(0) + 1)
      << "[" << op << "] shapes: rows are " << describe(rows_D) << " and "
      << describe(rows_F) << ", w is " << describe(w) << ", offsets are "
      << describe(offsets);
  CHECK(blas_rows(rows_D) && blas_rows(rows_F) && blas_rows(w))
      << "[" << op << "] rows: " << describe(rows_D) << ", " << describe(rows_F)
      << ", " << describe(w);
}

// On the CPU alone: a device's offsets are not the host's to read.
void check_offsets(const char* op, const View<const int32_t>& offsets,
                   int64_t rows) {
  const int64_t experts = offsets.size(0) - 1;
  CHECK(offsets(0) >= 0 && offsets(experts) <= rows)
      << "[" << op << "] offsets " << offsets(0) << " .. " << offsets(experts)
      << " of " << rows << " rows";
  for (int64_t e = 0; e < experts; ++e) {
    CHECK_LE(offsets(e), offsets(e + 1)) << "[" << op << "] expert " << e;
  }
}

// Rows [begin, end) of one expert.
struct RowTile {
  int64_t expert, begin, end;
};

// Tiles of rows in order of experts; slots past the last give an empty tile.
RowTile row_tile(const View<const int32_t>& offsets, int64_t slot) {
  const int64_t experts = offsets.size(0) - 1;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t first = offsets(e), last = offsets(e + 1);
    const int64_t tiles = ceil_div(last - first, kTileRows);
    if (slot < tiles) {
      const int64_t begin = first + slot * kTileRows;
      return {e, begin, std::min(begin + kTileRows, last)};
    }
    slot -= tiles;
  }
  return {0, 0, 0};
}

// y[r] = op(w[e]) x[r], with w[e] transposed for the forward product.
template <class T>
void rows_times_weights(Launch l, const View<const T>& x,
                        const View<const T>& w, bool transpose,
                        const View<const int32_t>& offsets, const View<T>& y) {
  // A bound on the row tiles that needs no pass over the offsets.
  const int64_t slots = w.size(0) + x.size(0) / kTileRows;
  const int64_t columns = y.size(1);
  const int64_t tiles_n = ceil_div(columns, kTileColumns);
  l.threads->parallel_for(slots * tiles_n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const RowTile rows = row_tile(offsets, t / tiles_n);
      const int64_t j = t % tiles_n * kTileColumns;
      const View<const T> we = w[rows.expert];
      gemm_tile<T, T>(rows.end - rows.begin,
                      std::min(kTileColumns, columns - j), x.size(1), 1,
                      {&x.data[rows.begin * x.strides[0]], x.strides[0], false},
                      {we.data + j * (transpose ? we.strides[0] : 1),
                       we.strides[0], transpose},
                      y.data + rows.begin * y.strides[0] + j, y.strides[0],
                      /*accumulate=*/false);
    }
  });
}

}  // namespace

template <class T>
void grouped_matmul_forward(Launch l, View<const T> x_RD, View<const T> w_EFD,
                            View<const int32_t> offsets, View<T> y_RF) {
  if (l.dry) return;
  check("grouped_matmul_forward", x_RD, y_RF, w_EFD, offsets);
  if (kCuda && l.on_cuda()) {
    return cuda::grouped_matmul_forward(l, x_RD, w_EFD, offsets, y_RF);
  }
  check_offsets("grouped_matmul_forward", offsets, x_RD.size(0));
  rows_times_weights(l, x_RD, w_EFD, /*transpose=*/true, offsets, y_RF);
}

template <class T>
void grouped_matmul_dgrad(Launch l, View<const T> dy_RF, View<const T> w_EFD,
                          View<const int32_t> offsets, View<T> dx_RD) {
  if (l.dry) return;
  check("grouped_matmul_dgrad", dx_RD, dy_RF, w_EFD, offsets);
  if (kCuda && l.on_cuda()) {
    return cuda::grouped_matmul_dgrad(l, dy_RF, w_EFD, offsets, dx_RD);
  }
  check_offsets("grouped_matmul_dgrad", offsets, dx_RD.size(0));
  rows_times_weights(l, dy_RF, w_EFD, /*transpose=*/false, offsets, dx_RD);
}

template <class T, class G>
void grouped_matmul_wgrad(Launch l, View<const T> dy_RF, View<const T> x_RD,
                          View<const int32_t> offsets, View<G> dw_EFD) {
  if (l.dry) return;
  check("grouped_matmul_wgrad", x_RD, dy_RF, dw_EFD, offsets);
  if (kCuda && l.on_cuda()) {
    return cuda::grouped_matmul_wgrad(l, dy_RF, x_RD, offsets, dw_EFD);
  }
  check_offsets("grouped_matmul_wgrad", offsets, x_RD.size(0));
  const int64_t f = dw_EFD.size(1), d = dw_EFD.size(2);
  const int64_t tiles_d = ceil_div(d, kTileColumns);
  const int64_t tiles = ceil_div(f, kTileRows) * tiles_d;
  l.threads->parallel_for(
      dw_EFD.size(0) * tiles, 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          const int64_t e = t / tiles;
          const int64_t i = t % tiles / tiles_d * kTileRows;
          const int64_t j = t % tiles_d * kTileColumns;
          const int64_t first = offsets(e), rows = offsets(e + 1) - first;
          const View<G> dw = dw_EFD[e];
          gemm_tile<T, G>(
              std::min(kTileRows, f - i), std::min(kTileColumns, d - j), rows,
              1,
              {dy_RF.data + first * dy_RF.strides[0] + i, dy_RF.strides[0],
               true},
              {x_RD.data + first * x_RD.strides[0] + j, x_RD.strides[0], false},
              dw.data + i * dw.strides[0] + j, dw.strides[0],
              /*accumulate=*/true);
        }
      });
}

Cost grouped_matmul_cost(int64_t experts, int64_t rows, int64_t f, int64_t d,
                         int64_t element_bytes) {
  return {.flops = 2.0 * rows * f * d,
          .bytes = 1.0 * element_bytes * (rows * (f + d) + experts * f * d)};
}

#define TAPELINE_GROUPED(T, G)                                               \
  template void grouped_matmul_forward(Launch, View<const T>, View<const T>, \
                                       View<const int32_t>, View<T>);        \
  template void grouped_matmul_dgrad(Launch, View<const T>, View<const T>,   \
                                     View<const int32_t>, View<T>);          \
  template void grouped_matmul_wgrad(Launch, View<const T>, View<const T>,   \
                                     View<const int32_t>, View<G>);
TAPELINE_GROUPED(float, float)
TAPELINE_GROUPED(bf16, float)
TAPELINE_GROUPED(double, double)
#undef TAPELINE_GROUPED

}  // namespace tapeline
