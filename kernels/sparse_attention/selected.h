// A query's selected keys, gathered in tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "kernels/attention/rows.h"
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

// visit(key, entry) for the entries of keys [first, last) in an inverse index
// (invert_ids), by blocks of queries and within a block key by key. A key's
// entries stay in order, and a block's queries stay in the cache while
// neighbouring keys, which tend to be chosen together, use them. At most
// kKeysPerChunk keys.
inline constexpr int64_t kKeysPerChunk = 16;
template <class Visit>
inline void visit_entries(const View<const int32_t>& offsets_S1,
                          const View<const int32_t>& entries, int64_t first,
                          int64_t last, int64_t tokens, int64_t slots,
                          int64_t bytes_per_query, Visit visit) {
  constexpr int64_t kCacheBytes = 64 << 10;  // a part of a core's L2
  const int64_t block = std::max<int64_t>(1, kCacheBytes / bytes_per_query);
  int32_t next[kKeysPerChunk];
  for (int64_t s = first; s < last; ++s) next[s - first] = offsets_S1(s);
  for (int64_t t = 0; t < tokens; t += block) {
    const int64_t end = std::min(tokens, t + block) * slots;
    for (int64_t s = first; s < last; ++s) {
      int32_t& i = next[s - first];
      for (; i < offsets_S1(s + 1) && entries(i) < end; ++i) {
        visit(s, entries(i));
      }
    }
  }
}

}  // namespace tapeline::internal
