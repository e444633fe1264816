// Squared length of a gradient, and whether all of it is finite: what clipping
// and the check of a step need.
//
//   squared_norm = sum_i x_i^2      in f64, so fp32 elements cannot overflow
//
// x is contiguous, of any shape, float or double. The sum runs over chunks
// whose cut depends on the length alone, then over the chunks in order: the
// same bits for any number of threads. A NaN or an infinity makes the sum NaN
// or infinite. The norm over many tensors is the root of their sums added in
// the order of the parameters, which no pipeline split changes.
// Bandwidth-bound: one read.
#pragma once

#include "kernels/kernel.h"

namespace tapeline {

template <class A>
double squared_norm(Launch, View<const A> x);

template <class A>
bool all_finite(Launch, View<const A> x);

inline Cost squared_norm_cost(int64_t elements) {
  return {.flops = 2.0 * elements, .bytes = 4.0 * elements};
}

}  // namespace tapeline
