#include "kernels/attention/key_range.h"

#include "runtime/check.h"

namespace tapeline {

void key_ranges_from_cu_seqlens(View<const int32_t> cu_seqlens,
                                View<int32_t> begin, View<int32_t> end) {
  CHECK(cu_seqlens.rank() == 1 && begin.rank() == 1 && end.rank() == 1 &&
        cu_seqlens.size(0) >= 1 && begin.shape == end.shape)
      << "[key_range] shapes: cu_seqlens is i32" << cu_seqlens.shape
      << ", begin is i32" << begin.shape << ", end is i32" << end.shape;
  const int64_t sequences = cu_seqlens.size(0) - 1;
  CHECK_EQ(cu_seqlens(0), 0) << "[key_range] first of cu_seqlens";
  CHECK_EQ(cu_seqlens(sequences), begin.size(0))
      << "[key_range] last of cu_seqlens against the number of rows";
  for (int64_t i = 0; i < sequences; ++i) {
    CHECK_LE(cu_seqlens(i), cu_seqlens(i + 1))
        << "[key_range] cu_seqlens decreases after entry " << i;
    for (int32_t t = cu_seqlens(i); t < cu_seqlens(i + 1); ++t) {
      begin(t) = cu_seqlens(i);
      end(t) = t + 1;
    }
  }
}

void check_key_range_shapes(std::string_view op, const KeyRange& range,
                            int64_t tokens) {
  CHECK((range.begin.shape == Shape{tokens}) &&
        (range.end.shape == Shape{tokens}))
      << "[" << op << "] key range: begin is i32" << range.begin.shape
      << ", end is i32" << range.end.shape << " for " << tokens << " rows";
}

void check_key_ranges(std::string_view op, const KeyRange& range,
                      int64_t tokens, int64_t keys) {
  check_key_range_shapes(op, range, tokens);
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t begin = range.begin(t), end = range.end(t);
    CHECK(begin >= end || (begin >= 0 && end <= keys))
        << "[" << op << "] row " << t << " sees keys [" << begin << ", " << end
        << ") of " << keys;
  }
}

}  // namespace tapeline
