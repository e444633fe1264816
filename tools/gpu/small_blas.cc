// The three functions of OpenBLAS that the CPU's matmul calls, in plain loops.
//
// Linked into the GPU bundle in OpenBLAS's place, whose kernels for every
// processor are larger than the whole bundle may be. On that machine the CPU
// checks and prepares; it does not train.
#include <cblas.h>

#include <cstddef>
#include <vector>

namespace {

// b as rows, so that the inner loop below has stride 1.
template <class T>
const T* as_rows(bool transposed, size_t k, size_t n, const T* b, size_t* ldb,
                 std::vector<T>& buffer) {
  if (!transposed) return b;
  buffer.resize(k * n);
  for (size_t j = 0; j < n; ++j) {
    for (size_t p = 0; p < k; ++p) buffer[p * n + j] = b[j * *ldb + p];
  }
  *ldb = n;
  return buffer.data();
}

template <class T>
void gemm(bool a_transposed, bool b_transposed, size_t m, size_t n, size_t k,
          T alpha, const T* a, size_t lda, const T* b, size_t ldb, T beta, T* c,
          size_t ldc) {
  static thread_local std::vector<T> buffer;
  b = as_rows(b_transposed, k, n, b, &ldb, buffer);
  for (size_t i = 0; i < m; ++i) {
    T* row = c + i * ldc;
    for (size_t j = 0; j < n; ++j) row[j] = beta == 0 ? 0 : beta * row[j];
    for (size_t p = 0; p < k; ++p) {
      const T factor = alpha * (a_transposed ? a[p * lda + i] : a[i * lda + p]);
      const T* from = b + p * ldb;
#pragma omp simd
      for (size_t j = 0; j < n; ++j) row[j] += factor * from[j];
    }
  }
}

}  // namespace

extern "C" {

void openblas_set_num_threads(int) {}

void cblas_sgemm(OPENBLAS_CONST enum CBLAS_ORDER,
                 OPENBLAS_CONST enum CBLAS_TRANSPOSE a_transpose,
                 OPENBLAS_CONST enum CBLAS_TRANSPOSE b_transpose,
                 OPENBLAS_CONST blasint m, OPENBLAS_CONST blasint n,
                 OPENBLAS_CONST blasint k, OPENBLAS_CONST float alpha,
                 OPENBLAS_CONST float* a, OPENBLAS_CONST blasint lda,
                 OPENBLAS_CONST float* b, OPENBLAS_CONST blasint ldb,
                 OPENBLAS_CONST float beta, float* c,
                 OPENBLAS_CONST blasint ldc) {
  gemm<float>(a_transpose == CblasTrans, b_transpose == CblasTrans, m, n, k,
              alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_dgemm(OPENBLAS_CONST enum CBLAS_ORDER,
                 OPENBLAS_CONST enum CBLAS_TRANSPOSE a_transpose,
                 OPENBLAS_CONST enum CBLAS_TRANSPOSE b_transpose,
                 OPENBLAS_CONST blasint m, OPENBLAS_CONST blasint n,
                 OPENBLAS_CONST blasint k, OPENBLAS_CONST double alpha,
                 OPENBLAS_CONST double* a, OPENBLAS_CONST blasint lda,
                 OPENBLAS_CONST double* b, OPENBLAS_CONST blasint ldb,
                 OPENBLAS_CONST double beta, double* c,
                 OPENBLAS_CONST blasint ldc) {
  gemm<double>(a_transpose == CblasTrans, b_transpose == CblasTrans, m, n, k,
               alpha, a, lda, b, ldb, beta, c, ldc);
}

}  // extern "C"
