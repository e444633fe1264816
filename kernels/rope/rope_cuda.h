// The CUDA side of rope.h: the same contracts, shapes already checked.
#pragma once

#include <vector>

#include "kernels/kernel.h"

namespace tapeline::cuda {

void rope_table(Launch l, View<const int32_t> positions_T,
                const std::vector<double>& inverse_frequencies, double factor,
                View<float> cos_TR2, View<float> sin_TR2);

template <class T>
void rope_forward(Launch l, View<const T> x_THR, View<const float> cos_TR2,
                  View<const float> sin_TR2, bool interleaved, View<T> y_THR);

template <class T>
void rope_backward(Launch l, View<const T> dy_THR, View<const float> cos_TR2,
                   View<const float> sin_TR2, bool interleaved, View<T> dx_THR);

}  // namespace tapeline::cuda
