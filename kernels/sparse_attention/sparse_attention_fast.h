// Which of two ways sparse attention takes on CUDA; pure, so that tests can
// print it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ostream>

namespace tapeline::cuda {

// The wgmma kernels are written for absorbed MLA: 512 columns of values and 64
// of rope. Heads are taken 64 at a time.
inline constexpr int kMlaDim = 576;
inline constexpr int kMlaValueDim = 512;
inline constexpr int kMlaHeads = 64;     // of one block
inline constexpr int kMlaMaxIds = 2048;  // of a row, held in shared memory

enum class SparseAttentionPath { kPlain, kWgmma };

inline std::ostream& operator<<(std::ostream& out, SparseAttentionPath path) {
  return out << (path == SparseAttentionPath::kPlain ? "plain" : "wgmma");
}

struct SparseAttentionOperands {
  bool bf16;
  int64_t dim, v_dim, selected;
  double scale;
  // All of q, kv, o (and of the gradients) start on 16 bytes and have strides
  // of a multiple of 8 elements.
  bool aligned;
};

// A scale above 0 keeps the order of scores, so the largest can be found before
// it is applied.
inline SparseAttentionPath sparse_attention_path(
    const SparseAttentionOperands& x) {
  const bool fits = x.bf16 && x.dim == kMlaDim && x.v_dim == kMlaValueDim &&
                    x.selected <= kMlaMaxIds && x.scale > 0 && x.aligned;
  return fits ? SparseAttentionPath::kWgmma : SparseAttentionPath::kPlain;
}

// The backward pass in parts of `chunk` queries: each (query, slot) writes its
// gradient of a key row in bf16, and rows of one key are then added in order.
// Byte offsets into the workspace, which is aligned to 16.
struct SparseBackwardPlan {
  int64_t chunk, head_blocks;
  size_t ids, slots, counts;  // of each query: valid ids, where they stood
  size_t next;                // of each key: its first entry not added yet
  size_t sums;                // of each key, f32, between chunks
  size_t rows;                // [chunk, selected, head_blocks, dim] bf16
  size_t bytes;

  friend std::ostream& operator<<(std::ostream& out,
                                  const SparseBackwardPlan& p) {
    return out << p.chunk << " queries at a time, " << p.head_blocks
               << " blocks of heads, " << p.bytes << " bytes";
  }
};

// About 1.25 GB of rows: 528 queries of 2048 keys and 64 heads, four for each
// of an H200's 132 multiprocessors.
inline SparseBackwardPlan sparse_backward_plan(int64_t tokens, int64_t keys,
                                               int64_t heads, int64_t dim,
                                               int64_t selected) {
  constexpr int64_t kRowBytes = int64_t{1250} << 20;
  SparseBackwardPlan p{};
  p.head_blocks = (heads + kMlaHeads - 1) / kMlaHeads;
  const int64_t each = std::max<int64_t>(
      1, selected * p.head_blocks * dim * static_cast<int64_t>(2));
  const int64_t multiprocessors = 132;
  const int64_t fit = std::max<int64_t>(1, kRowBytes / each);
  const int64_t whole = fit / multiprocessors * multiprocessors;
  p.chunk = std::max<int64_t>(1, std::min(tokens, whole > 0 ? whole : fit));
  const auto take = [&](int64_t bytes) {
    const size_t at = p.bytes;
    p.bytes += static_cast<size_t>((bytes + 15) / 16 * 16);
    return at;
  };
  p.ids = take(tokens * selected * 4);
  p.slots = take(tokens * selected * 2);
  p.counts = take(tokens * 4);
  p.next = take(keys * 4);
  p.sums = take(p.chunk < tokens ? keys * dim * 4 : 0);
  p.rows = take(p.chunk * each);
  return p;
}

}  // namespace tapeline::cuda
