// The CUDA side of cross_entropy.h: the same contracts, shapes already checked.
#pragma once

#include "kernels/kernel.h"

namespace tapeline::cuda {

template <class T>
void cross_entropy_forward(Launch, View<const T> logits_TV,
                           View<const int32_t> labels_T,
                           View<Accumulator<T>> loss_T,
                           View<Accumulator<T>> lse_T);

template <class T>
void cross_entropy_backward(Launch, View<T> logits_TV,
                            View<const int32_t> labels_T,
                            View<const Accumulator<T>> lse_T,
                            View<const Accumulator<T>> weight_T);

template <class T>
void cross_entropy_forward_backward(Launch, View<T> logits_TV,
                                    View<const int32_t> labels_T,
                                    View<const Accumulator<T>> weight_T,
                                    View<Accumulator<T>> loss_T,
                                    View<Accumulator<T>> lse_T);

// The same within cross_entropy_plan()'s envelope, where there are tokens.
void cross_entropy_clusters(Launch, View<bf16> logits_TV,
                            View<const int32_t> labels_T,
                            View<const float> weight_T, View<float> loss_T,
                            View<float> lse_T);

template <class T>
void cross_entropy_scale(Launch, View<T> dlogits_TV,
                         View<const Accumulator<T>> factor);

}  // namespace tapeline::cuda
