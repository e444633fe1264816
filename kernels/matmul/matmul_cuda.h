// The CUDA side of matmul.h: the same contract, shapes already checked, all
// operands with a batch.
#pragma once

#include "kernels/kernel.h"
#include "kernels/matmul/matmul.h"

namespace tapeline::cuda {

template <class T, class C>
void matmul(Launch l, View<const T> a, View<const T> b, View<C> c,
            MatmulOptions options);

// By cuBLASLt, in f32 without TF32; false, and nothing done, where it has no
// algorithm. Splits of K are summed in f32 in a fixed order. A problem keeps
// the algorithm it was first given. A stream's workspace is made on its first
// call and kept.
template <class T, class C>
bool matmul_lt(Launch l, View<const T> a, View<const T> b, View<C> c,
               MatmulOptions options);

// Some of cuBLASLt's algorithms round a product to bf16 before they add it to
// c, and nothing that it tells of an algorithm says which. So a bf16 c gets its
// products by way of f32: this many of them at a time, in memory of the stream
// that is made on its first such call and kept.
inline constexpr int64_t kProducts = int64_t{8} << 20;
float* matmul_products(Launch l);

}  // namespace tapeline::cuda
