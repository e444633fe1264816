#include "kernels/cuda_dispatch.h"
#include "kernels/matmul/gemm_tile.h"
#include "kernels/matmul/matmul.h"
#include "kernels/matmul/matmul_cuda.h"

namespace tapeline {
namespace {

// The matrices of a batch; a matrix alone is a batch of one.
template <class T>
View<T> batched(const View<T>& x) {
  if (x.rank() == 3) return x;
  return {x.data, Shape{1, x.shape[0], x.shape[1]},
          Shape{0, x.strides[0], x.strides[1]}};
}

template <class T>
bool blas_rows(const View<T>& x) {
  return dense_rows(x) && (x.size(-2) <= 1 || x.strides[-2] >= x.size(-1));
}

struct Sizes {
  int64_t batch, m, n, k;
};

template <class T, class C>
Sizes check(const View<const T>& a, const View<const T>& b, const View<C>& c,
            const MatmulOptions& options) {
  const auto what = [&] {
    return "a is " + describe(a) + (options.transpose_a ? "^T" : "") +
           ", b is " + describe(b) + (options.transpose_b ? "^T" : "") +
           ", c is " + describe(c);
  };
  CHECK((a.rank() == 2 || a.rank() == 3) && b.rank() == a.rank() &&
        c.rank() == a.rank())
      << "[matmul] ranks: " << what();
  const Sizes sizes = {.batch = c.rank() == 3 ? c.size(0) : 1,
                       .m = c.size(-2),
                       .n = c.size(-1),
                       .k = a.size(options.transpose_a ? -2 : -1)};
  CHECK(
      a.size(options.transpose_a ? -1 : -2) == sizes.m &&
      b.size(options.transpose_b ? -2 : -1) == sizes.n &&
      b.size(options.transpose_b ? -1 : -2) == sizes.k &&
      (c.rank() == 2 || (a.size(0) == sizes.batch && b.size(0) == sizes.batch)))
      << "[matmul] shapes: " << what();
  CHECK(blas_rows(a) && blas_rows(b) && blas_rows(c))
      << "[matmul] rows: " << what();
  CHECK(sizes.batch <= 1 || c.strides[0] != 0)
      << "[matmul] the batch shares c: " << what();
  return sizes;
}

}  // namespace

// 128 x 512 keeps 98 % of the rate of an uncut product at K = 128 and half a
// tile still 85 % (OpenBLAS repacks b for every tile of rows). Small products
// are cut further so that several threads have work; below 64 x 128 packing
// costs more than that gains.
MatmulTiles matmul_tiles(int64_t batch, int64_t m, int64_t n) {
  constexpr int64_t kTiles = 8;
  MatmulTiles tile = {128, 512};
  const auto tiles = [&] {
    return batch * ceil_div(m, tile.rows) * ceil_div(n, tile.columns);
  };
  while (tiles() < kTiles && tile.columns > 128) tile.columns /= 2;
  if (tiles() < kTiles) tile.rows /= 2;
  return tile;
}

template <class T, class C>
void matmul(Launch l, View<const T> a, View<const T> b, View<C> c,
            MatmulOptions options) {
  if (l.dry) return;
  const Sizes sizes = check(a, b, c, options);
  a = batched(a);
  b = batched(b);
  c = batched(c);
  if (kCuda && l.on_cuda()) return cuda::matmul(l, a, b, c, options);
  const MatmulTiles tile = matmul_tiles(sizes.batch, sizes.m, sizes.n);
  const int64_t tiles_n = ceil_div(sizes.n, tile.columns);
  const int64_t tiles_mn = ceil_div(sizes.m, tile.rows) * tiles_n;
  l.threads->parallel_for(
      sizes.batch * tiles_mn, 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          const int64_t i = t % tiles_mn / tiles_n * tile.rows;
          const int64_t j = t % tiles_n * tile.columns;
          const View<const T> at = a[t / tiles_mn], bt = b[t / tiles_mn];
          const View<C> ct = c[t / tiles_mn];
          gemm_tile<T, C>(
              std::min(tile.rows, sizes.m - i),
              std::min(tile.columns, sizes.n - j), sizes.k, options.alpha,
              {at.data + i * (options.transpose_a ? 1 : at.strides[0]),
               at.strides[0], options.transpose_a},
              {bt.data + j * (options.transpose_b ? bt.strides[0] : 1),
               bt.strides[0], options.transpose_b},
              ct.data + i * ct.strides[0] + j, ct.strides[0],
              options.accumulate);
        }
      });
}

Cost matmul_cost(int64_t batch, int64_t m, int64_t n, int64_t k,
                 int64_t element_bytes) {
  return {.flops = 2.0 * batch * m * n * k,
          .bytes = 1.0 * batch * element_bytes * (m * k + k * n + m * n)};
}

#define TAPELINE_MATMUL(T, C)                                         \
  template void matmul(Launch, View<const T>, View<const T>, View<C>, \
                       MatmulOptions);
TAPELINE_MATMUL(float, float)
TAPELINE_MATMUL(bf16, bf16)
TAPELINE_MATMUL(bf16, float)
TAPELINE_MATMUL(double, double)
#undef TAPELINE_MATMUL

}  // namespace tapeline
