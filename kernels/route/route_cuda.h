// The CUDA side of route.h: the same contracts, shapes already checked.
#pragma once

#include "kernels/kernel.h"

namespace tapeline::cuda {

void route(Launch, View<const int32_t> ids_TK, View<int32_t> offsets_E1,
           View<int32_t> row_TK, View<int32_t> token_R, View<int32_t> slot_R);

}  // namespace tapeline::cuda
