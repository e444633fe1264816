// Products of a few rows with a tile of keys: the inner loops of attention, the
// indexer and their gradients on the CPU.
//
//   dots          c[m, n]  = sum_d a[m, d] b[n, d]
//   add_product   c[m, n] += sum_k a[m, k] b[k, n]
//
// in the accumulator's type A, float or double; last strides are 1 except for
// add_product's a. The value of an element depends on its own terms alone,
// never on the other rows and columns of the call: dots keeps one partial sum
// per vector lane (term d in lane d % lanes) and joins them pairwise,
// add_product adds k = 0, 1, ... with one fused operation each. So tiles may be
// cut anywhere without changing a bit.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "kernels/attention/rows.h"

namespace tapeline::internal {

// --- one AVX register --------------------------------------------------------

template <class A>
struct Avx;
template <>
struct Avx<float> {
  using Type = __m256;
  static Type load(const float* p) { return _mm256_loadu_ps(p); }
  // The first `lanes` of them, zeros behind.
  static __m256i first(int64_t lanes) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(lanes)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Type load(const float* p, __m256i mask) {
    return _mm256_maskload_ps(p, mask);
  }
  static void store(float* p, Type x) { _mm256_storeu_ps(p, x); }
  static Type broadcast(float x) { return _mm256_set1_ps(x); }
  static Type fma(Type a, Type b, Type c) { return _mm256_fmadd_ps(a, b, c); }
  // out[i] = sum of the lanes of x_i, joined pairwise.
  static void sum4(Type x0, Type x1, Type x2, Type x3, float* out) {
    const Type pairs =
        _mm256_hadd_ps(_mm256_hadd_ps(x0, x1), _mm256_hadd_ps(x2, x3));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs),
                                  _mm256_extractf128_ps(pairs, 1)));
  }
};
template <>
struct Avx<double> {
  using Type = __m256d;
  static Type load(const double* p) { return _mm256_loadu_pd(p); }
  static __m256i first(int64_t lanes) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(lanes),
                              _mm256_setr_epi64x(0, 1, 2, 3));
  }
  static Type load(const double* p, __m256i mask) {
    return _mm256_maskload_pd(p, mask);
  }
  static void store(double* p, Type x) { _mm256_storeu_pd(p, x); }
  static Type broadcast(double x) { return _mm256_set1_pd(x); }
  static Type fma(Type a, Type b, Type c) { return _mm256_fmadd_pd(a, b, c); }
  static void sum4(Type x0, Type x1, Type x2, Type x3, double* out) {
    const Type a = _mm256_hadd_pd(x0, x1), b = _mm256_hadd_pd(x2, x3);
    _mm256_storeu_pd(out, _mm256_add_pd(_mm256_permute2f128_pd(a, b, 0x20),
                                        _mm256_permute2f128_pd(a, b, 0x31)));
  }
};
template <class A>
inline constexpr int kAvxWidth = 32 / sizeof(A);

// --- dots --------------------------------------------------------------------

// M x N elements at once: enough sums in flight to hide the latency of a fused
// operation.
template <int M, int N, class A>
inline void dots_block(int64_t d, Rows<const A> a, Rows<const A> b, Rows<A> c) {
  using R = Avx<A>;
  constexpr int kSums = (M * N + 3) / 4 * 4;
  typename R::Type sum[kSums];
#pragma GCC unroll 8
  for (int i = 0; i < kSums; ++i) sum[i] = R::broadcast(0);
  const auto add = [&](auto load) __attribute__((always_inline)) {
    typename R::Type y[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) y[n] = load(b[n]);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const auto x = load(a[m]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        sum[m * N + n] = R::fma(x, y[n], sum[m * N + n]);
      }
    }
  };
  int64_t i = 0;
  for (; i + kAvxWidth<A> <= d; i += kAvxWidth<A>) {
    add([i](const A* row) { return R::load(row + i); });
  }
  if (i < d) {
    const auto mask = R::first(d - i);
    add([i, mask](const A* row) { return R::load(row + i, mask); });
  }
  A out[kSums];
#pragma GCC unroll 8
  for (int s = 0; s < kSums; s += 4) {
    R::sum4(sum[s], sum[s + 1], sum[s + 2], sum[s + 3], out + s);
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) c[m][n] = out[m * N + n];
  }
}

// c [m, n] = a [m, d] b [n, d]^T. Overwrites.
template <class A>
inline void dots(int64_t m, int64_t n, int64_t d, Rows<const A> a,
                 Rows<const A> b, Rows<A> c) {
  const int64_t blocked = m / 4 * 4;
  int64_t j = 0;
  for (; j + 2 <= n; j += 2) {
    for (int64_t i = 0; i < blocked; i += 4) {
      dots_block<4, 2>(d, a.from(i), b.from(j), c.from(i, j));
    }
  }
  for (int64_t i = 0; j < n && i < blocked; i += 4) {
    dots_block<4, 1>(d, a.from(i), b.from(j), c.from(i, j));
  }
  for (int64_t i = blocked; i < m; ++i) {
    for (j = 0; j + 4 <= n; j += 4) {
      dots_block<1, 4>(d, a.from(i), b.from(j), c.from(i, j));
    }
    for (; j < n; ++j) {
      dots_block<1, 1>(d, a.from(i), b.from(j), c.from(i, j));
    }
  }
}

// --- add_product -------------------------------------------------------------

template <int M, int N, class A>
inline void product_block(int64_t k, Factor<A> a, Rows<const A> b, Rows<A> c) {
  using R = Avx<A>;
  typename R::Type sum[M][N];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) sum[m][n] = R::load(c[m] + n * kAvxWidth<A>);
  }
  for (int64_t i = 0; i < k; ++i) {
    typename R::Type y[N];
    for (int n = 0; n < N; ++n) y[n] = R::load(b[i] + n * kAvxWidth<A>);
    for (int m = 0; m < M; ++m) {
      const auto x = R::broadcast(a(m, i));
      for (int n = 0; n < N; ++n) sum[m][n] = R::fma(x, y[n], sum[m][n]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) R::store(c[m] + n * kAvxWidth<A>, sum[m][n]);
  }
}

// M rows, all columns: widest blocks first.
template <int M, int N, class A>
inline void product_rows(int64_t n, int64_t k, Factor<A> a, Rows<const A> b,
                         Rows<A> c) {
  constexpr int64_t kStep = N * kAvxWidth<A>;
  int64_t j = 0;
  for (; j + kStep <= n; j += kStep) {
    product_block<M, N>(k, a, b.from(0, j), c.from(0, j));
  }
  if (j == n) return;
  if constexpr (N > 1) {
    product_rows<M, N / 2>(n - j, k, a, b.from(0, j), c.from(0, j));
  } else {
    for (int m = 0; m < M; ++m) {
      for (int64_t i = 0; i < k; ++i) {
        for (int64_t jj = j; jj < n; ++jj) {
          c[m][jj] = std::fma(a(m, i), b[i][jj], c[m][jj]);
        }
      }
    }
  }
}

// c [m, n] += a [m, k] b [k, n].
template <class A>
inline void add_product(int64_t m, int64_t n, int64_t k, Factor<A> a,
                        Rows<const A> b, Rows<A> c) {
  int64_t i = 0;
  for (; i + 4 <= m; i += 4) {
    product_rows<4, 2>(n, k, a.from(i, 0), b, c.from(i));
  }
  for (; i < m; ++i) product_rows<1, 8>(n, k, a.from(i, 0), b, c.from(i));
}

}  // namespace tapeline::internal
