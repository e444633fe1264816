// The CUDA side of router.h: the same contracts, shapes already checked. Ids
// are read on the device alone.
#pragma once

#include "kernels/kernel.h"
#include "kernels/router/router.h"

namespace tapeline::cuda {

template <class A>
void router_choose(Launch l, View<const A> logits_TE, View<const A> bias_E,
                   const RouterOptions& options, View<int32_t> ids_TK);

template <class A>
void router_weights(Launch l, View<const A> logits_TE,
                    View<const int32_t> ids_TK, const RouterOptions& options,
                    View<A> weight_TK);

template <class A>
void router_weights_backward(Launch l, View<const A> dweight_TK,
                             View<const A> logits_TE,
                             View<const int32_t> ids_TK,
                             const RouterOptions& options, View<A> dlogits_TE);

}  // namespace tapeline::cuda
