// Which keys a query row sees: row t sees keys begin[t] <= s < end[t], indices
// into the key rows of the call. A row with begin >= end sees none.
//
//   packed training    begin = start of t's sequence, end = t + 1
//   cached decoding    S > T, end = number of keys in the cache up to this
//   token
#pragma once

#include <cstdint>
#include <string_view>

#include "runtime/view.h"

namespace tapeline {

struct KeyRange {
  View<const int32_t> begin, end;  // [T] each
};

// The causal ranges of sequences packed one after the other: sequence i holds
// rows [cu_seqlens[i], cu_seqlens[i + 1]). cu_seqlens [n + 1] starts at 0,
// never decreases and ends at T; begin, end [T]. Host memory, host call.
// Overwrites.
void key_ranges_from_cu_seqlens(View<const int32_t> cu_seqlens,
                                View<int32_t> begin, View<int32_t> end);

// CHECKs that both have `tokens` entries; `op` opens the message.
void check_key_range_shapes(std::string_view op, const KeyRange& range,
                            int64_t tokens);

// The same, and that every range that is not empty lies in [0, keys). Host
// memory.
void check_key_ranges(std::string_view op, const KeyRange& range,
                      int64_t tokens, int64_t keys);

}  // namespace tapeline
