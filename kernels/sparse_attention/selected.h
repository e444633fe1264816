// A query's selected keys, gathered in tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "kernels/attention/tile.h"
#include "runtime/check.h"
#include "runtime/view.h"

namespace tapeline::internal {

// CHECKs that every id of the row is -1 or a key; `op` opens the message.
inline void check_ids(std::string_view op, const int32_t* ids, int64_t k,
                      int64_t keys) {
  int bad = 0;
#pragma omp simd reduction(+ : bad)
  for (int64_t j = 0; j < k; ++j) bad += ids[j] < -1 || ids[j] >= keys ? 1 : 0;
  CHECK(bad == 0) << "[" << op << "] " << bad
                  << " ids of a row are no key in [0, " << keys
                  << ") and not -1";
}

// Up to kKeyTile valid ids of one row and where they stand in it.
struct Selected {
  int count = 0;
  int32_t id[kKeyTile], slot[kKeyTile];
};

// visit(tile) for tiles of kKeyTile valid ids, the last one shorter: -1 takes
// no place, so tiles do not depend on where it stands.
template <class Visit>
inline void visit_selected(const int32_t* ids, int64_t k, Visit visit) {
  Selected tile;
  for (int64_t j = 0; j < k; ++j) {
    tile.id[tile.count] = ids[j];
    tile.slot[tile.count] = static_cast<int32_t>(j);
    tile.count += ids[j] >= 0 ? 1 : 0;
    if (tile.count == kKeyTile) {
      visit(tile);
      tile.count = 0;
    }
  }
  if (tile.count > 0) visit(tile);
}

// The tile's rows of x [S, D] in the accumulator's type, side by side.
template <class T>
inline Rows<const Accumulator<T>> gather(const View<const T>& x_SD,
                                         const Selected& tile,
                                         Accumulator<T>* buffer) {
  const int64_t d = x_SD.size(1);
  for (int j = 0; j < tile.count; ++j) {
    convert(x_SD.data + tile.id[j] * x_SD.strides[0], buffer + j * d, d);
  }
  return {buffer, d};
}

// Heads [h, h + n) of row t of x [T, H, D] in the accumulator's type; `buffer`
// holds kConverted<T, kRowTile>.
template <class T>
inline Rows<const Accumulator<T>> heads_of(const View<const T>& x_THD,
                                           int64_t t, int64_t h, int64_t n,
                                           Accumulator<T>* buffer) {
  const T* from = x_THD.data + t * x_THD.strides[0] + h * x_THD.strides[1];
  return converted<T>({from, x_THD.strides[1]}, n, x_THD.size(2), buffer);
}

}  // namespace tapeline::internal
