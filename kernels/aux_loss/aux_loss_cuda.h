// The CUDA side of aux_loss.h: the same contracts, shapes already checked.
// counts are [S, E].
#pragma once

#include "kernels/aux_loss/aux_loss.h"

namespace tapeline::cuda {

template <class C>
void count_experts(Launch, View<const int32_t> ids_TK, const TokenSet&,
                   View<C> counts_SE);

// partial is empty or kLossPartials. bias is null unless the kind reads it.
template <class A>
void balance_loss_forward(Launch, BalanceKind, View<const A> logits_TE,
                          const A* bias, View<const int32_t> counts_SE,
                          const TokenSet&, View<A> loss_1,
                          View<double> partial);
template <class A>
void balance_loss_backward(Launch, double dloss, BalanceKind,
                           View<const A> logits_TE, const A* bias,
                           View<const int32_t> counts_SE, const TokenSet&,
                           View<A> dlogits_TE);

template <class A>
void z_loss_forward(Launch, View<const A> logits_TE, const TokenSet&,
                    View<A> loss_1, View<double> partial);
template <class A>
void z_loss_backward(Launch, double dloss, View<const A> logits_TE,
                     const TokenSet&, View<A> dlogits_TE);

void update_router_bias(Launch, View<const int64_t> counts_ME, double rate,
                        View<float> bias_E, View<const double> clip_1);

}  // namespace tapeline::cuda
