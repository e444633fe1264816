// Squared length of a gradient, and whether all of it is finite: what clipping
// and the check of a step need.
//
//   squared_norm = sum_i x_i^2      in f64, so fp32 elements cannot overflow
//
// x is contiguous, of any shape, float or double. The sum runs over chunks
// whose cut depends on the length alone, then over the chunks in order: the
// same bits for any number of threads. A NaN or an infinity makes the sum NaN
// or infinite. The norm over many tensors is the root of their sums added in
// the order of the parameters, which no pipeline split changes. What returns a
// value to the host waits for the launch's stream.
// Bandwidth-bound: one read.
#pragma once

#include <vector>

#include "kernels/kernel.h"

namespace tapeline {

template <class A>
double squared_norm(Launch, View<const A> x);

template <class A>
bool all_finite(Launch, View<const A> x);

// The same for a device that the host does not wait for, of many tensors in few
// launches; the bits of each do not depend on the others:
//   each[i] = squared norm of x[i]; partial [N, kNormPartials] is workspace
//   total[0] += each[0], each[1], .. one after the other
//   factor[0] = min(1, max_norm / (sqrt(squares[0]) + 1e-6)), as
//               torch.nn.utils.clip_grad_norm_; 1 for max_norm = 0; NaN if
//               squares is not finite: then a step is not taken (adamw.h).
inline constexpr int64_t kNormPartials = 512;
inline constexpr double kClipEps = 1e-6;

template <class A>
void squared_norms(Launch, const std::vector<View<const A>>& x,
                   View<double> partial, View<double> each_N);
void add_in_order(Launch, View<const double> each_N, View<double> total_1);
void clip_factor(Launch, View<const double> squares_1, double max_norm,
                 View<double> factor_1);

inline Cost squared_norm_cost(int64_t elements) {
  return {.flops = 2.0 * elements, .bytes = 4.0 * elements};
}

}  // namespace tapeline
