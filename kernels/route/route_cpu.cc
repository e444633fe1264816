#include <algorithm>
#include <limits>

#include "kernels/cuda_dispatch.h"
#include "kernels/route/route.h"
#include "kernels/route/route_cuda.h"

namespace tapeline {

size_t route_workspace_bytes(const Launch& l, int64_t tokens, int64_t top_k,
                             int64_t experts) {
  if (kCuda && l.on_cuda()) {
    return cuda::route_workspace_bytes(tokens * top_k, experts);
  }
  return 0;
}

void route(Launch l, View<const int32_t> ids, View<int32_t> offsets,
           View<int32_t> row, View<int32_t> token, View<int32_t> slot,
           std::byte* workspace) {
  if (l.dry) return;
  CHECK(ids.rank() == 2 && row.shape == ids.shape)
      << "[route] shapes: row is " << describe(row) << ", ids are "
      << describe(ids);
  CHECK(offsets.rank() == 1 && offsets.size(0) >= 1 && offsets.contiguous())
      << "[route] offsets need E + 1 elements: they are " << describe(offsets);
  CHECK(token.rank() == 1 && token.contiguous() && slot.shape == token.shape &&
        slot.contiguous())
      << "[route] shapes: token is " << describe(token) << ", slot is "
      << describe(slot);
  CHECK_LE(offsets.size(0) - 1, kMaxRoutedExperts) << "[route] experts";
  CHECK_LE(ids.elements(), std::numeric_limits<int32_t>::max());
  if (kCuda && l.on_cuda()) {
    const bool groups =
        workspace != nullptr &&
        cuda::route_workspace_bytes(ids.elements(), offsets.size(0) - 1) > 0;
    return groups ? cuda::route_groups(l, ids, offsets, row, token, slot,
                                       workspace)
                  : cuda::route(l, ids, offsets, row, token, slot);
  }
  const int64_t tokens = ids.size(0), top_k = ids.size(1);
  const int64_t experts = offsets.size(0) - 1, capacity = token.size(0);

  // offsets[e + 1] := rows of expert e, then their running sum.
  std::fill_n(offsets.data, experts + 1, 0);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t k = 0; k < top_k; ++k) {
      const int32_t e = ids(t, k);
      CHECK(e >= -1 && e < experts) << "[route] expert id " << e << " of "
                                    << experts << " at token " << t;
      if (e >= 0) ++offsets.data[e + 1];
    }
  }
  for (int64_t e = 0; e < experts; ++e) offsets.data[e + 1] += offsets.data[e];
  const int32_t routed = offsets.data[experts];
  CHECK_LE(routed, capacity) << "[route] rows do not fit the capacity";

  // offsets[e] walks from the first row of e to the first row of e + 1.
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t k = 0; k < top_k; ++k) {
      const int32_t e = ids(t, k);
      if (e < 0) {
        row(t, k) = -1;
        continue;
      }
      const int32_t r = offsets.data[e]++;
      row(t, k) = r;
      token.data[r] = static_cast<int32_t>(t);
      slot.data[r] = static_cast<int32_t>(k);
    }
  }
  for (int64_t e = experts; e > 0; --e) offsets.data[e] = offsets.data[e - 1];
  offsets.data[0] = 0;
  std::fill(token.data + routed, token.data + capacity, -1);
  std::fill(slot.data + routed, slot.data + capacity, -1);
}

}  // namespace tapeline
