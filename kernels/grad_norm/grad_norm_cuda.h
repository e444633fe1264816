// The CUDA side of grad_norm.h: the same contracts, shapes already checked.
#pragma once

#include <vector>

#include "kernels/kernel.h"

namespace tapeline::cuda {

// These two wait for their result.
template <class A>
double squared_norm(Launch, View<const A> x);
template <class A>
bool all_finite(Launch, View<const A> x);

template <class A>
void squared_norms(Launch, const std::vector<View<const A>>& x,
                   View<double> partial, View<double> each_N);
void add_in_order(Launch, View<const double> each_N, View<double> total_1);
void clip_factor(Launch, View<const double> squares_1, double max_norm,
                 View<double> factor_1);

}  // namespace tapeline::cuda
