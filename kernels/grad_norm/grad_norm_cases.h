// Lengths that reductions over a gradient are tested with: around a vector, a
// chunk and the largest number of chunks.
#pragma once

#include <cstdint>
#include <vector>

namespace tapeline {

inline const std::vector<int64_t>& grad_norm_lengths() {
  static const std::vector<int64_t> lengths = {
      0, 1, 15, 16, 17, 1000, 16384, 16385, 100003, 256 * 16384 + 77};
  return lengths;
}

}  // namespace tapeline
