// The CUDA side of route.h: the same contracts, shapes already checked.
#pragma once

#include <cstddef>

#include "kernels/kernel.h"

namespace tapeline::cuda {

void route(Launch, View<const int32_t> ids_TK, View<int32_t> offsets_E1,
           View<int32_t> row_TK, View<int32_t> token_R, View<int32_t> slot_R);

// The same by all processors.
size_t route_workspace_bytes(int64_t pairs, int64_t experts);
void route_groups(Launch, View<const int32_t> ids_TK, View<int32_t> offsets_E1,
                  View<int32_t> row_TK, View<int32_t> token_R,
                  View<int32_t> slot_R, std::byte* workspace);

}  // namespace tapeline::cuda
