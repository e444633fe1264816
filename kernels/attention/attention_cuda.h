// The CUDA side of attention.h: the same contracts, shapes already checked. The
// ranges are read on the device alone.
#pragma once

#include <cstddef>

#include "kernels/attention/key_range.h"
#include "kernels/kernel.h"

namespace tapeline::cuda {

template <class T>
void attention_forward(Launch l, View<const T> q_THD, View<const T> k_SGD,
                       View<const T> v_SGV, KeyRange range, double scale,
                       View<T> o_THV, View<Accumulator<T>> lse_TH);

template <class T>
size_t attention_backward_workspace_bytes(const View<const T>& q_THD,
                                          const View<const T>& k_SGD,
                                          const View<const T>& v_SGV,
                                          const View<const T>& o_THV,
                                          double scale);

template <class T>
void attention_backward(Launch l, View<const T> do_THV, View<const T> q_THD,
                        View<const T> k_SGD, View<const T> v_SGV,
                        View<const T> o_THV, View<const Accumulator<T>> lse_TH,
                        KeyRange range, double scale, View<T> dq_THD,
                        View<T> dk_SGD, View<T> dv_SGV, std::byte* workspace);

}  // namespace tapeline::cuda
