// The CUDA side of top_k.h: the same contract, shapes already checked. The
// ranges are read on the device alone.
#pragma once

#include "kernels/attention/key_range.h"
#include "kernels/kernel.h"

namespace tapeline::cuda {

template <class S>
void top_k(Launch l, View<const S> scores_NS, KeyRange range, int k,
           View<int32_t> ids_NK);

}  // namespace tapeline::cuda
