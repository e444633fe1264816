// The CUDA side of attention.h: the same contracts, shapes already checked. The
// ranges are read on the device alone.
#pragma once

#include "kernels/attention/key_range.h"
#include "kernels/kernel.h"

namespace tapeline::cuda {

template <class T>
void attention_forward(Launch l, View<const T> q_THD, View<const T> k_SGD,
                       View<const T> v_SGV, KeyRange range, double scale,
                       View<T> o_THV, View<Accumulator<T>> lse_TH);

template <class T>
void attention_backward(Launch l, View<const T> do_THV, View<const T> q_THD,
                        View<const T> k_SGD, View<const T> v_SGV,
                        View<const T> o_THV, View<const Accumulator<T>> lse_TH,
                        KeyRange range, double scale, View<T> dq_THD,
                        View<T> dk_SGD, View<T> dv_SGV);

}  // namespace tapeline::cuda
