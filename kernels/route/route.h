// Routing tables: where every (token, slot) goes when rows are grouped by
// expert, and where every row comes from.
//
//   row_TK[t, k]   row of the pair in expert order, -1 where ids is -1
//   offsets_E1[e]  first row of expert e; offsets[E] = number of routed rows
//   token_R[r], slot_R[r]  the pair of row r, -1 from offsets[E] to R
//
// Rows are ordered by expert, then token, then slot: a stable counting sort, so
// the order never depends on threads or on the other experts' load.
// R, the capacity, is at least the number of ids that are not -1 (CHECK on the
// CPU). All int32; everything is overwritten. One pass to count and one to
// place, on the calling thread: the copies that follow move 1000 times more.
// At most kMaxRoutedExperts experts and 2^31 - 1 ids.
// `workspace` is aligned to 16 bytes; without one, a GPU counts in the shared
// memory of eight of its processors alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernel.h"

namespace tapeline {

// A GPU without a workspace counts in the shared memory of a block.
inline constexpr int64_t kMaxRoutedExperts = 12800;

void route(Launch, View<const int32_t> ids_TK, View<int32_t> offsets_E1,
           View<int32_t> row_TK, View<int32_t> token_R, View<int32_t> slot_R,
           std::byte* workspace = nullptr);
// May be 0.
size_t route_workspace_bytes(const Launch& l, int64_t tokens, int64_t top_k,
                             int64_t experts);

}  // namespace tapeline
