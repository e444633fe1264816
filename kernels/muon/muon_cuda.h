// The CUDA side of muon.h: the same contracts, shapes already checked, and the
// steps of an orthogonalization around its products.
#pragma once

#include "kernels/kernel.h"

namespace tapeline::cuda {

template <class A>
void muon_momentum(Launch, View<const A> grad, View<A> momentum, double beta,
                   bool nesterov, View<A> update, double gradient_scale,
                   View<const double> clip_1);
template <class A>
void muon_apply(Launch, View<const A> update, double lr_scaled,
                double weight_decay, double lr, View<A> param,
                View<const double> clip_1);

// x = update / (its length + 1e-7); x may be the update. Without workspace and
// without the host: one cluster reads the update twice.
template <class A>
void muon_normalize(Launch, View<const A> update, View<A> x);

// p = a I + b s + p, of square matrices.
template <class A>
void muon_add_terms(Launch, double a, double b, View<const A> s, View<A> p);

}  // namespace tapeline::cuda
