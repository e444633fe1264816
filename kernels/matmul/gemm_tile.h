// One tile of a matrix product on the calling thread: the CPU's BLAS call, with
// bf16 done by way of float.
//
//   c [m, n] = alpha * op(a) op(b) + (accumulate ? c : 0)
// Row-major; op(a) is m x k, op(b) k x n; `stride` is the distance of rows in
// memory, at least their length. bf16 operands are widened into buffers that
// each thread keeps and reuses.
#pragma once

#include <cstdint>

namespace tapeline {

template <class T>
struct GemmOperand {
  const T* data;
  int64_t stride;
  bool transpose;
};

// T in {float, bf16, double}; C = T or float.
template <class T, class C>
void gemm_tile(int64_t m, int64_t n, int64_t k, double alpha, GemmOperand<T> a,
               GemmOperand<T> b, C* c, int64_t c_stride, bool accumulate);

}  // namespace tapeline
