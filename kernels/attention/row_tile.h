// A tile of query rows, and which rectangles of a key tile they see.
//
// A row is one (query, head) pair; the `ratio` heads that share keys are
// neighbours, so that they share a tile: row r belongs to query r / ratio.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/attention/key_range.h"
#include "kernels/attention/rows.h"

namespace tapeline::internal {

struct Span {
  int begin, end;
  bool empty() const { return begin >= end; }
};

// The rows of a tile and which keys they see.
struct RowTile {
  int64_t first;  // row of the group
  int rows;
  int64_t begin[kRowTile], end[kRowTile];  // key rows
  int64_t min_begin, max_end;              // min_begin >= max_end: no keys

  Span span(int row, int64_t key, int keys) const {
    const int64_t lo = std::max<int64_t>(begin[row] - key, 0);
    const int64_t hi = std::min<int64_t>(end[row] - key, keys);
    if (lo >= hi) return {0, 0};
    return {static_cast<int>(lo), static_cast<int>(hi)};
  }
};

inline RowTile row_tile(const KeyRange& range, int64_t ratio, int64_t tile,
                        int64_t rows) {
  RowTile t;
  t.first = tile * kRowTile;
  t.rows = static_cast<int>(std::min<int64_t>(kRowTile, rows - t.first));
  t.min_begin = std::numeric_limits<int64_t>::max();
  t.max_end = 0;
  for (int m = 0; m < t.rows; ++m) {
    const int64_t query = (t.first + m) / ratio;
    t.begin[m] = range.begin(query);
    t.end[m] = range.end(query);
    if (t.begin[m] >= t.end[m]) continue;
    t.min_begin = std::min(t.min_begin, t.begin[m]);
    t.max_end = std::max(t.max_end, t.end[m]);
  }
  return t;
}

// Cuts what the rows see of one key tile into rectangles of (first row, rows,
// keys): blocks of four rows where all of them see the key, single rows for the
// ragged ends. Each row visits its keys, and each key its rows, in ascending
// order.
template <class Visit>
inline void visit_rectangles(const Span* span, int rows, Visit visit) {
  for (int m = 0; m < rows; m += 4) {
    const int n = std::min(4, rows - m);
    Span common = span[m];
    for (int i = 1; i < n; ++i) {
      common.begin = std::max(common.begin, span[m + i].begin);
      common.end = std::min(common.end, span[m + i].end);
    }
    if (common.empty()) {
      for (int i = 0; i < n; ++i) {
        if (!span[m + i].empty()) visit(m + i, 1, span[m + i]);
      }
      continue;
    }
    for (int i = 0; i < n; ++i) {
      const Span before{span[m + i].begin, common.begin};
      if (!before.empty()) visit(m + i, 1, before);
    }
    visit(m, n, common);
    for (int i = 0; i < n; ++i) {
      const Span after{common.end, span[m + i].end};
      if (!after.empty()) visit(m + i, 1, after);
    }
  }
}

}  // namespace tapeline::internal
