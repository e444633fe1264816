// top_k of float scores where top_k_plan says radix (top_k_fast.h).
#pragma once

#include "kernels/attention/key_range.h"
#include "kernels/kernel.h"
#include "kernels/top_k/top_k_fast.h"

namespace tapeline::cuda {

void top_k_radix(Launch l, const TopKPlan& plan, View<const float> scores_NS,
                 KeyRange range, int k, View<int32_t> ids_NK);

}  // namespace tapeline::cuda
