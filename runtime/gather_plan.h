// How a strided tensor is copied into row-major order on a GPU: with words as
// wide as its rows allow, and without dimensions that are one in memory.
//
// Dimensions are those of the tensor, in their order, each merged with the next
// where the two are walked by one stride. size and stride are in words, the
// last dimension has stride 1 where words are wider than elements. Nothing of
// bytes: the plan depends on shape, strides and alignment alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/shape.h"

namespace tapeline {

struct GatherPlan {
  size_t word = 0;  // bytes: 1, 2, 4, 8 or 16
  int dims = 0;     // at least 1
  int64_t size[Shape::kMaxRank] = {}, stride[Shape::kMaxRank] = {};
  int64_t count = 0;  // words
  // Every index and every offset fits into 32 bits.
  bool small = false;
};

// element: bytes of one. alignment: a power of two that both addresses are
// multiples of. At least one element; strides are not negative.
GatherPlan plan_gather(size_t element, const Shape& shape, const Shape& strides,
                       size_t alignment);

}  // namespace tapeline
