// Which of two ways the indexer takes on CUDA; pure, so that tests can print
// it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>

namespace tapeline::cuda {

// A block of the wgmma kernel multiplies kIndexerColumns columns, (query, head)
// pairs, with `chunk` keys. Heads are padded to a power of two.
inline constexpr int kIndexerColumns = 256;
inline constexpr int kIndexerTile = 64;  // keys of one warpgroup's multiply

struct IndexerPlan {
  bool wgmma = false;
  int padded_heads = 0;
  int64_t chunk = 0;  // keys of a block

  int queries() const { return kIndexerColumns / padded_heads; }

  friend bool operator==(const IndexerPlan&, const IndexerPlan&) = default;
  friend std::ostream& operator<<(std::ostream& out, const IndexerPlan& p) {
    if (!p.wgmma) return out << "plain";
    return out << "wgmma: " << p.queries() << " queries of " << p.padded_heads
               << " heads with " << p.chunk << " keys";
  }
};

// Rows (strides in elements) must start on 16 bytes, for TMA. A scale above 0
// can be moved into the weights: relu(scale x) = scale relu(x).
struct IndexerOperands {
  bool bf16;
  uintptr_t q, k;  // addresses
  int64_t tokens, heads, dim, keys;
  int64_t q_stride, head_stride, k_stride;
  double scale;
};

inline IndexerPlan indexer_plan(const IndexerOperands& x) {
  const auto aligned = [](int64_t stride) { return stride % 8 == 0; };
  if (!x.bf16 || x.q % 16 != 0 || x.k % 16 != 0 || !aligned(x.q_stride) ||
      !aligned(x.head_stride) || !aligned(x.k_stride)) {
    return {};
  }
  if (!(x.scale > 0) || x.dim > 128 || x.dim % 8 != 0 || x.heads > 128 ||
      x.heads == 0 || x.dim == 0 || x.keys == 0 || x.tokens == 0 ||
      x.keys >= int64_t{1} << 31 || x.tokens >= int64_t{1} << 31) {
    return {};
  }
  IndexerPlan plan{true, 8, 0};
  while (plan.padded_heads < x.heads) plan.padded_heads *= 2;
  // About eight blocks for each of an H200's 132 multiprocessors, of not less
  // than 1024 keys each, so that loading the queries stays a small part.
  const int64_t query_blocks = (x.tokens + plan.queries() - 1) / plan.queries();
  const int64_t blocks = std::max<int64_t>(1, 132 * 8 / query_blocks);
  const int64_t keys = std::max<int64_t>(1024, (x.keys + blocks - 1) / blocks);
  plan.chunk = (keys + kIndexerTile - 1) / kIndexerTile * kIndexerTile;
  return plan;
}

}  // namespace tapeline::cuda
