// The CUDA side of array.h's normal(); its bits may differ from the CPU's by
// the roundings of log and cos.
#pragma once

#include "kernels/kernel.h"

namespace tapeline::cuda {

// T in {float, bf16, double}.
template <class T>
void fill_normal(Launch l, uint64_t key, View<T> out);

}  // namespace tapeline::cuda
