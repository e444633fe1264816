// Plain: 64 x 64 tiles in Accumulator<T>, right at any size. A tile of rows
// belongs to one expert, so nothing is padded. The path says which calls go to
// grouped_matmul_wgmma.cu instead.
#include "kernels/cuda_tile.cuh"
#include "kernels/grouped_matmul/grouped_matmul_cuda.h"
#include "kernels/grouped_matmul/grouped_matmul_fast.h"

namespace tapeline::cuda {
namespace {

// Rows [begin, end) of one expert.
struct RowTile {
  int64_t expert, begin, end;
};

// Tiles of rows in order of experts; slots past the last give an empty tile.
__device__ RowTile row_tile(const Rows<const int32_t, 1>& offsets,
                            int64_t slot) {
  const int64_t experts = offsets.size[0] - 1;
  int64_t first = offsets(0);
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t last = offsets(e + 1);
    const int64_t tiles = ceil_div(last - first, kTile);
    if (slot < tiles) {
      const int64_t begin = first + slot * kTile;
      return {e, begin, min(begin + kTile, last)};
    }
    slot -= tiles;
    first = last;
  }
  return {0, 0, 0};
}

// The weight of row r's element k in its element n of the product.
template <class T>
struct Weights {
  const T* data;
  int64_t expert, n, k;  // strides
};

// y[r, n] = sum_k x[r, k] w[e](n, k)
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    grouped_rows_times_weights_kernel(Rows<const T, 2> x, Weights<T> w,
                                      Rows<const int32_t, 1> offsets,
                                      Rows<T, 2> y) {
  using A = Accumulator<T>;
  const int64_t columns = y.size[1], tiles_n = ceil_div(columns, kTile);
  const RowTile tile = row_tile(offsets, blockIdx.x / tiles_n);
  if (tile.begin >= tile.end) return;
  const int64_t j0 = blockIdx.x % tiles_n * kTile;
  const T* weights = w.data + tile.expert * w.expert;
  Tile<A> sum;
  sum.add(
      x.size[1], true,
      [&](int i, int64_t k) {
        return tile.begin + i < tile.end ? A(load(x(tile.begin + i, k))) : A(0);
      },
      w.k == 1,
      [&](int j, int64_t k) {
        return j0 + j < columns ? A(load(weights[(j0 + j) * w.n + k * w.k]))
                                : A(0);
      });
#pragma unroll
  for (int i = 0; i < sum.kEach; ++i) {
#pragma unroll
    for (int j = 0; j < sum.kEach; ++j) {
      const int64_t r = tile.begin + sum.row(i), column = j0 + sum.column(j);
      if (r < tile.end && column < columns) store(y(r, column), sum.at[i][j]);
    }
  }
}

template <class T, class G>
__global__ void __launch_bounds__(kTileThreads)
    grouped_wgrad_kernel(Rows<const T, 2> dy, Rows<const T, 2> x,
                         Rows<const int32_t, 1> offsets, Rows<G, 3> dw) {
  using A = Accumulator<T>;
  const int64_t f = dw.size[1], d = dw.size[2];
  const int64_t tiles_d = ceil_div(d, kTile), tiles_f = ceil_div(f, kTile);
  const int64_t block = blockIdx.x;
  const int64_t expert = block / (tiles_f * tiles_d);
  const int64_t i0 = block / tiles_d % tiles_f * kTile;
  const int64_t j0 = block % tiles_d * kTile;
  const int64_t first = offsets(expert), rows = offsets(expert + 1) - first;
  if (rows <= 0) return;
  Tile<A> sum;
  sum.add(
      rows, false,
      [&](int i, int64_t r) {
        return i0 + i < f ? A(load(dy(first + r, i0 + i))) : A(0);
      },
      false,
      [&](int j, int64_t r) {
        return j0 + j < d ? A(load(x(first + r, j0 + j))) : A(0);
      });
#pragma unroll
  for (int i = 0; i < sum.kEach; ++i) {
#pragma unroll
    for (int j = 0; j < sum.kEach; ++j) {
      const int64_t row = i0 + sum.row(i), column = j0 + sum.column(j);
      if (row < f && column < d) dw(expert, row, column) += sum.at[i][j];
    }
  }
}

template <class T>
void launch_rows(const char* op, Launch l, const View<const T>& x,
                 int64_t experts, const Weights<T>& w,
                 const View<const int32_t>& offsets, const View<T>& y) {
  // A bound on the row tiles that needs no look at the offsets.
  const int64_t slots = experts + x.size(0) / kTile;
  const int64_t blocks = slots * ceil_div(y.size(1), kTile);
  if (blocks == 0 || experts == 0) return;
  grouped_rows_times_weights_kernel<T>
      <<<static_cast<unsigned>(blocks), kTileThreads, 0, stream_of(l)>>>(
          rows<2>(x), w, rows<1>(offsets), rows<2>(y));
  check_launch(op);
}

}  // namespace

template <class T>
void grouped_matmul_forward(Launch l, View<const T> x_RD, View<const T> w_EFD,
                            View<const int32_t> offsets, View<T> y_RF) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (grouped_matmul_forward_path(x_RD, w_EFD, y_RF).wgmma) {
      return grouped_matmul_forward_wgmma(l, x_RD, w_EFD, offsets, y_RF);
    }
  }
  const Shape& steps = w_EFD.strides;
  launch_rows<T>("grouped_matmul_forward", l, x_RD, w_EFD.size(0),
                 {w_EFD.data, steps[0], steps[1], steps[2]}, offsets, y_RF);
}

template <class T>
void grouped_matmul_dgrad(Launch l, View<const T> dy_RF, View<const T> w_EFD,
                          View<const int32_t> offsets, View<T> dx_RD) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (grouped_matmul_dgrad_path(dy_RF, w_EFD, dx_RD).wgmma) {
      return grouped_matmul_dgrad_wgmma(l, dy_RF, w_EFD, offsets, dx_RD);
    }
  }
  const Shape& steps = w_EFD.strides;
  launch_rows<T>("grouped_matmul_dgrad", l, dy_RF, w_EFD.size(0),
                 {w_EFD.data, steps[0], steps[2], steps[1]}, offsets, dx_RD);
}

template <class T, class G>
void grouped_matmul_wgrad(Launch l, View<const T> dy_RF, View<const T> x_RD,
                          View<const int32_t> offsets, View<G> dw_EFD) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (grouped_matmul_wgrad_path(dy_RF, x_RD, dw_EFD).wgmma) {
      return grouped_matmul_wgrad_wgmma(l, dy_RF, x_RD, offsets, dw_EFD);
    }
  }
  const int64_t blocks = dw_EFD.size(0) * ceil_div(dw_EFD.size(1), kTile) *
                         ceil_div(dw_EFD.size(2), kTile);
  if (blocks == 0) return;
  grouped_wgrad_kernel<T, G>
      <<<static_cast<unsigned>(blocks), kTileThreads, 0, stream_of(l)>>>(
          rows<2>(dy_RF), rows<2>(x_RD), rows<1>(offsets), rows<3>(dw_EFD));
  check_launch("grouped_matmul_wgrad");
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

}  // namespace tapeline::cuda
