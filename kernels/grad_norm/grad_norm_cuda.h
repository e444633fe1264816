// The CUDA side of grad_norm.h: the same contracts, shapes already checked.
#pragma once

#include "kernels/kernel.h"

namespace tapeline::cuda {

// These two wait for their result.
template <class A>
double squared_norm(Launch, View<const A> x);
template <class A>
bool all_finite(Launch, View<const A> x);

template <class A>
void add_squared_norm(Launch, View<const A> x, View<double> partial,
                      View<double> total_1);
void clip_factor(Launch, View<const double> squares_1, double max_norm,
                 View<double> factor_1);

}  // namespace tapeline::cuda
