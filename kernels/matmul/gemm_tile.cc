#include "kernels/matmul/gemm_tile.h"

#include <cblas.h>

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "kernels/simd_math.h"
#include "runtime/check.h"
#include "runtime/dtype.h"

namespace tapeline {
namespace {

// OpenBLAS's own threads would change the order of sums, and compete with ours.
void use_one_blas_thread() {
  [[maybe_unused]] static const bool once = [] {
    openblas_set_num_threads(1);
    return true;
  }();
}

CBLAS_TRANSPOSE transposed(bool yes) { return yes ? CblasTrans : CblasNoTrans; }

blasint to_blas(int64_t value) {
  CHECK_LE(value, std::numeric_limits<blasint>::max()) << "[matmul] size";
  return static_cast<blasint>(value);
}

// A single row may have any stride; BLAS wants one of at least its length.
template <class T>
int64_t leading(const GemmOperand<T>& x, int64_t rows, int64_t columns) {
  return rows > 1 ? x.stride : std::max<int64_t>(1, columns);
}

template <class A>
void blas(int64_t m, int64_t n, int64_t k, double alpha, GemmOperand<A> a,
          GemmOperand<A> b, A* c, int64_t c_stride, bool accumulate) {
  use_one_blas_thread();
  const int64_t lda = a.transpose ? leading(a, k, m) : leading(a, m, k);
  const int64_t ldb = b.transpose ? leading(b, n, k) : leading(b, k, n);
  const int64_t ldc = m > 1 ? c_stride : n;
  const A beta = accumulate ? 1 : 0;
  const auto gemm = [] {
    if constexpr (std::is_same_v<A, double>)
      return cblas_dgemm;
    else
      return cblas_sgemm;
  }();
  gemm(CblasRowMajor, transposed(a.transpose), transposed(b.transpose),
       to_blas(m), to_blas(n), to_blas(k), static_cast<A>(alpha), a.data,
       to_blas(lda), b.data, to_blas(ldb), beta, c, to_blas(ldc));
}

float* grown(std::vector<float>& buffer, int64_t elements) {
  if (static_cast<int64_t>(buffer.size()) < elements) buffer.resize(elements);
  return buffer.data();
}

// rows x columns of x, dense and widened to float.
GemmOperand<float> widened(const GemmOperand<bf16>& x, int64_t rows,
                           int64_t columns, std::vector<float>& buffer) {
  if (x.transpose) std::swap(rows, columns);
  float* to = grown(buffer, rows * columns);
  for (int64_t i = 0; i < rows; ++i) {
    convert(x.data + i * x.stride, to + i * columns, columns);
  }
  return {to, columns, x.transpose};
}

}  // namespace

template <class T, class C>
void gemm_tile(int64_t m, int64_t n, int64_t k, double alpha, GemmOperand<T> a,
               GemmOperand<T> b, C* c, int64_t c_stride, bool accumulate) {
  if (m == 0 || n == 0 || (k == 0 && accumulate)) return;
  if (k == 0) {
    for (int64_t i = 0; i < m; ++i) {
      std::fill_n(c + i * c_stride, n, C(0.0f));
    }
    return;
  }
  if constexpr (!std::is_same_v<T, bf16>) {
    blas(m, n, k, alpha, a, b, c, c_stride, accumulate);
  } else {
    static thread_local std::vector<float> a_buffer, b_buffer, c_buffer;
    const GemmOperand<float> af = widened(a, m, k, a_buffer);
    const GemmOperand<float> bf = widened(b, k, n, b_buffer);
    if constexpr (std::is_same_v<C, float>) {
      blas(m, n, k, alpha, af, bf, c, c_stride, accumulate);
    } else {
      float* cf = grown(c_buffer, m * n);
      for (int64_t i = 0; accumulate && i < m; ++i) {
        convert(c + i * c_stride, cf + i * n, n);
      }
      blas(m, n, k, alpha, af, bf, cf, n, accumulate);
      for (int64_t i = 0; i < m; ++i) {
        convert(cf + i * n, c + i * c_stride, n);
      }
    }
  }
}

template void gemm_tile(int64_t, int64_t, int64_t, double, GemmOperand<float>,
                        GemmOperand<float>, float*, int64_t, bool);
template void gemm_tile(int64_t, int64_t, int64_t, double, GemmOperand<bf16>,
                        GemmOperand<bf16>, bf16*, int64_t, bool);
template void gemm_tile(int64_t, int64_t, int64_t, double, GemmOperand<bf16>,
                        GemmOperand<bf16>, float*, int64_t, bool);
template void gemm_tile(int64_t, int64_t, int64_t, double, GemmOperand<double>,
                        GemmOperand<double>, double*, int64_t, bool);

}  // namespace tapeline
