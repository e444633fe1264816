// Which of two ways attention takes on CUDA; pure, so that tests can print it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ostream>

namespace tapeline::cuda {

enum class AttentionPath { kPlain, kWgmma };

inline std::ostream& operator<<(std::ostream& out, AttentionPath path) {
  return out << (path == AttentionPath::kPlain ? "plain" : "wgmma");
}

struct AttentionOperands {
  bool bf16;
  int64_t tokens, keys, heads, groups, dim, v_dim;
  double scale;
  // All of q, k, v, o (and of the gradients) start on 16 bytes, and strides but
  // the last are positive multiples of 8 elements.
  bool aligned;
};

// The number of tokens has no say: one token decoded with a cache gets the bits
// that it has in the whole sequence. A scale above 0 keeps the order of scores,
// so the largest can be found before it is applied.
inline AttentionPath attention_path(const AttentionOperands& x) {
  constexpr int64_t kMost = int64_t{1} << 30;  // coordinates are int32
  const bool dims = (x.dim == 128 && x.v_dim == 128) ||
                    (x.dim == 192 && x.v_dim == 128) ||
                    (x.dim == 256 && x.v_dim == 256);
  const bool fits = x.tokens > 0 && x.keys > 0 && x.heads > 0 && x.groups > 0 &&
                    x.tokens < kMost && x.keys < kMost &&
                    x.heads * (x.tokens / 64 + 1) < kMost &&
                    x.groups * (x.keys / 64 + 1) < kMost;
  return x.bf16 && dims && fits && x.scale > 0 && x.aligned
             ? AttentionPath::kWgmma
             : AttentionPath::kPlain;
}

// Where the backward pass keeps what it derives from its inputs; byte offsets
// into the workspace, which is aligned to 16.
struct AttentionBackwardPlan {
  int64_t padded;  // tokens, rounded up to whole tiles
  size_t rows;     // [H, padded] {lse in powers of 2, do . o}, f32
  size_t ranges;   // [padded] {begin, end}
  size_t tiles;    // [padded / 64] what all, and what any, of 64 queries see
  size_t bytes;

  friend std::ostream& operator<<(std::ostream& out,
                                  const AttentionBackwardPlan& p) {
    return out << p.padded << " queries, " << p.bytes << " bytes";
  }
};

inline AttentionBackwardPlan attention_backward_plan(int64_t tokens,
                                                     int64_t heads) {
  AttentionBackwardPlan p{};
  p.padded = (tokens + 127) / 128 * 128;
  const auto take = [&](int64_t bytes) {
    const size_t at = p.bytes;
    p.bytes += static_cast<size_t>((bytes + 127) / 128 * 128);
    return at;
  };
  p.rows = take(heads * p.padded * 8);
  p.ranges = take(p.padded * 8);
  p.tiles = take(p.padded / 64 * 16);
  return p;
}

}  // namespace tapeline::cuda
