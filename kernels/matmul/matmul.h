// c = alpha * op(a) op(b), or c += that; op is the identity or a transpose.
//
//   a [M, K] or, transposed, [K, M]   T      b [K, N] or [N, K]   T
//   c [M, N]   C = T, or float for bf16 inputs
// With rank 3, dimension 0 is a batch; an operand whose batch stride is 0 is
// shared by the batch (c may not). Rows have last stride 1 and any distance of
// at least their length.
// Sums run over all of K in Accumulator<T>; with accumulate, c joins the sum
// before the only rounding. K = 0 gives zeros, or c unchanged. c overlaps
// neither input. Compute-bound: 2 M N K flops.
//
// The CPU cuts c into tiles by its shape alone and computes each by one call of
// single-threaded BLAS, whose results depend on the tile it is given: so they
// are the same for any number of threads. On CUDA f32 (never TF32) and bf16 are
// cuBLASLt's, which keeps to one algorithm per problem and sums the parts of a
// split K in f32 in a fixed order, and a bf16 c is added to from products in
// f32; f64 is a plain kernel. A stream's first call makes its workspace, so it
// must not be captured in a graph.
#pragma once

#include "kernels/kernel.h"

namespace tapeline {

struct MatmulOptions {
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;
  double alpha = 1;
};

template <class T, class C>
void matmul(Launch l, View<const T> a, View<const T> b, View<C> c,
            MatmulOptions options = {});

Cost matmul_cost(int64_t batch, int64_t m, int64_t n, int64_t k,
                 int64_t element_bytes);

// Rows and columns of c per tile on the CPU.
struct MatmulTiles {
  int64_t rows, columns;
  bool operator==(const MatmulTiles&) const = default;
};
MatmulTiles matmul_tiles(int64_t batch, int64_t m, int64_t n);

}  // namespace tapeline
