// Sequence: which keys a token of a packed row may see.
//
// A micro-batch is one row of T tokens, several sequences end to end
// (cu_seqlens). Query t sees keys [begin[t], end[t]) of S key rows: its own
// sequence up to itself. Decoding with a cache appends tokens to one sequence:
// S > T. Positions restart in every sequence. All tensors int32 on the device.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/tensor.h"
#include "runtime/tree.h"

namespace tapeline {

struct Sequence {
  Tensor begin_T, end_T, position_T;
  FIELDS(begin_T, end_T, position_T);

  int64_t tokens() const { return begin_T.size(0); }

  // cu_seqlens: 0, then the end of each sequence, never decreasing.
  static Sequence packed(const std::vector<int32_t>& cu_seqlens);
  // `count` new tokens after `cached` ones of a single sequence.
  static Sequence appended(int64_t cached, int64_t count);
};

}  // namespace tapeline
