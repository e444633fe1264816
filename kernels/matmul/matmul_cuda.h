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

}  // namespace tapeline::cuda
