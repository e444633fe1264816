#include <algorithm>

#include "kernels/cuda_tile.cuh"
#include "kernels/matmul/matmul_cuda.h"

namespace tapeline::cuda {
namespace {

// A factor's element (row or column of c, k).
template <class T>
struct Factor {
  const T* data;
  int64_t batch, row, k;  // strides
};

template <class T>
Factor<T> factor(const View<const T>& x, bool k_first) {
  const int64_t batch = x.size(0) > 1 ? x.strides[0] : 0;
  return k_first ? Factor<T>{x.data, batch, x.strides[2], x.strides[1]}
                 : Factor<T>{x.data, batch, x.strides[1], x.strides[2]};
}

// One block a tile of c: what cuBLASLt does not do.
template <class T, class C>
__global__ void __launch_bounds__(kTileThreads)
    matmul_plain_kernel(Factor<T> a, Factor<T> b, Rows<C, 3> c, int64_t depth,
                        Accumulator<T> alpha, bool accumulate) {
  using A = Accumulator<T>;
  const int64_t m = c.size[1], n = c.size[2];
  const int64_t tiles_n = ceil_div(n, kTile), tiles_m = ceil_div(m, kTile);
  const int64_t block = blockIdx.x;
  const int64_t batch = block / (tiles_m * tiles_n);
  const int64_t i0 = block / tiles_n % tiles_m * kTile;
  const int64_t j0 = block % tiles_n * kTile;
  const T* a_rows = a.data + batch * a.batch;
  const T* b_rows = b.data + batch * b.batch;
  Tile<A> sum;
  sum.add(
      depth, a.k == 1,
      [&](int i, int64_t k) {
        return i0 + i < m ? A(load(a_rows[(i0 + i) * a.row + k * a.k])) : A(0);
      },
      b.k == 1,
      [&](int j, int64_t k) {
        return j0 + j < n ? A(load(b_rows[(j0 + j) * b.row + k * b.k])) : A(0);
      });
#pragma unroll
  for (int i = 0; i < sum.kEach; ++i) {
#pragma unroll
    for (int j = 0; j < sum.kEach; ++j) {
      const int64_t row = i0 + sum.row(i), column = j0 + sum.column(j);
      if (row >= m || column >= n) continue;
      C& out = c(batch, row, column);
      const A value = alpha * sum.at[i][j];
      store(out, accumulate ? value + load(out) : value);
    }
  }
}

template <class T, class C>
void launch_plain(const Launch& l, const View<const T>& a,
                  const View<const T>& b, const View<C>& c,
                  const MatmulOptions& options) {
  const int64_t blocks =
      c.size(0) * ceil_div(c.size(1), kTile) * ceil_div(c.size(2), kTile);
  matmul_plain_kernel<T, C>
      <<<static_cast<unsigned>(blocks), kTileThreads, 0, stream_of(l)>>>(
          factor(a, options.transpose_a), factor(b, !options.transpose_b),
          rows<3>(c), a.size(options.transpose_a ? 1 : 2),
          static_cast<Accumulator<T>>(options.alpha), options.accumulate);
  check_launch("matmul");
}

// c += product, one element a thread.
__global__ void __launch_bounds__(kTileThreads)
    matmul_add_products_kernel(const float* product, Rows<bf16, 3> c) {
  const int64_t at = int64_t{blockIdx.x} * kTileThreads + threadIdx.x;
  const int64_t j = at % c.size[2], row = at / c.size[2];
  const int64_t batch = row / c.size[1];
  if (batch >= c.size[0]) return;
  bf16& out = c(batch, row % c.size[1], j);
  store(out, load(out) + product[at]);
}

// c += a b by way of f32 products (matmul_cuda.h), for as many whole matrices,
// or else rows of one, as there is memory for.
void accumulate_bf16(const Launch& l, const View<const bf16>& a,
                     const View<const bf16>& b, const View<bf16>& c,
                     const MatmulOptions& options) {
  const int64_t batches = c.size(0), m = c.size(1), n = c.size(2);
  const int64_t each = std::clamp<int64_t>(kProducts / (m * n), 1, batches);
  const int64_t step = std::clamp<int64_t>(kProducts / n, 1, m);
  MatmulOptions product_options = options;
  product_options.accumulate = false;
  for (int64_t batch = 0; batch < batches; batch += each) {
    const int64_t next = std::min(batch + each, batches);
    const auto b_part = b.slice(0, batch, next);
    for (int64_t i = 0; i < m; i += step) {
      const int64_t end = std::min(i + step, m);
      const auto a_part =
          a.slice(0, batch, next).slice(options.transpose_a ? 2 : 1, i, end);
      const auto c_part = c.slice(0, batch, next).slice(1, i, end);
      if (n <= kProducts) {
        const View<float> product(matmul_products(l), c_part.shape);
        if (matmul_lt<bf16, float>(l, a_part, b_part, product,
                                   product_options)) {
          matmul_add_products_kernel<<<static_cast<unsigned>(ceil_div(
                                           product.elements(), kTileThreads)),
                                       kTileThreads, 0, stream_of(l)>>>(
              product.data, rows<3>(c_part));
          check_launch("matmul");
          continue;
        }
      }
      launch_plain<bf16, bf16>(l, a_part, b_part, c_part, options);
    }
  }
}

}  // namespace

template <class T, class C>
void matmul(Launch l, View<const T> a, View<const T> b, View<C> c,
            MatmulOptions options) {
  const int64_t depth = a.size(options.transpose_a ? 1 : 2);
  if (c.elements() == 0 || (depth == 0 && options.accumulate)) return;
  if constexpr (std::is_same_v<C, bf16>) {
    if (options.accumulate) return accumulate_bf16(l, a, b, c, options);
  }
  if constexpr (!std::is_same_v<T, double>) {
    if (depth > 0 && matmul_lt<T, C>(l, a, b, c, options)) return;
  }
  launch_plain<T, C>(l, a, b, c, options);
}

#define TAPELINE_MATMUL(T, C)                                         \
  template void matmul(Launch, View<const T>, View<const T>, View<C>, \
                       MatmulOptions);
TAPELINE_MATMUL(float, float)
TAPELINE_MATMUL(bf16, bf16)
TAPELINE_MATMUL(bf16, float)
TAPELINE_MATMUL(double, double)
#undef TAPELINE_MATMUL

}  // namespace tapeline::cuda
