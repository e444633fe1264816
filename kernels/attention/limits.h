// What attention and its indexer take at most, on any device.
#pragma once

namespace tapeline {

// Columns of a query, key or value head.
inline constexpr int kMaxHeadDim = 640;  // absorbed MLA has 576

}  // namespace tapeline
