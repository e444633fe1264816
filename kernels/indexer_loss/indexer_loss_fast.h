// Which of two ways the indexer's loss takes on CUDA; pure, so that tests can
// print it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ostream>

namespace tapeline::cuda {

// A block of the wgmma kernels has one query. All of its indexer heads are the
// columns of one multiply; attention's are taken as many at a time, and are
// those of absorbed MLA.
inline constexpr int kLossHeads = 64;
inline constexpr int kLossAttentionDim = 576;
inline constexpr int kLossMaxIds = 2048;  // of a row, held in shared memory

enum class IndexerLossPath { kPlain, kWgmma };

inline std::ostream& operator<<(std::ostream& out, IndexerLossPath path) {
  return out << (path == IndexerLossPath::kPlain ? "plain" : "wgmma");
}

// Aligned: what is read and written in bf16 starts on 16 bytes and has strides
// of a multiple of 8 elements. A scale above 0 can be moved into the weights:
// relu(scale x) = scale relu(x).
struct IndexerLossOperands {
  bool bf16;
  int64_t index_heads, index_dim, keys, selected;
  double index_scale;
  bool aligned;
};

inline IndexerLossPath indexer_loss_backward_path(
    const IndexerLossOperands& x) {
  const bool fits = x.bf16 && x.index_heads > 0 &&
                    x.index_heads <= kLossHeads &&
                    (x.index_dim == 64 || x.index_dim == 128) && x.keys > 0 &&
                    x.selected <= kLossMaxIds && x.index_scale > 0 && x.aligned;
  return fits ? IndexerLossPath::kWgmma : IndexerLossPath::kPlain;
}

inline IndexerLossPath indexer_loss_forward_path(const IndexerLossOperands& x,
                                                 int64_t heads, int64_t dim) {
  return heads > 0 && dim == kLossAttentionDim ? indexer_loss_backward_path(x)
                                               : IndexerLossPath::kPlain;
}

// The backward pass in parts of `chunk` queries: each (query, slot) writes its
// gradient of a key row in f32, and rows of one key are then added. Byte
// offsets into the workspace, which is aligned to 16.
struct IndexerLossPlan {
  int64_t chunk;
  size_t sums;  // of each key, f32, between chunks
  size_t rows;  // [chunk, selected, dim] f32
  size_t bytes;

  friend std::ostream& operator<<(std::ostream& out, const IndexerLossPlan& p) {
    return out << p.chunk << " queries at a time, " << p.bytes << " bytes";
  }
};

// Chunks of about one size, of at most `row_bytes` of rows where a query's fit.
inline IndexerLossPlan indexer_loss_plan(int64_t tokens, int64_t keys,
                                         int64_t dim, int64_t selected,
                                         int64_t row_bytes = int64_t{1} << 30) {
  IndexerLossPlan p{};
  const int64_t each = std::max<int64_t>(1, selected * dim * 4);
  const int64_t fit = std::max<int64_t>(1, row_bytes / each);
  const int64_t chunks = std::max<int64_t>(1, (tokens + fit - 1) / fit);
  p.chunk = std::max<int64_t>(1, (tokens + chunks - 1) / chunks);
  const auto take = [&](int64_t bytes) {
    const size_t at = p.bytes;
    p.bytes += static_cast<size_t>((bytes + 15) / 16 * 16);
    return at;
  };
  p.sums = take(p.chunk < tokens ? keys * dim * 4 : 0);
  p.rows = take(p.chunk * each);
  return p;
}

}  // namespace tapeline::cuda
