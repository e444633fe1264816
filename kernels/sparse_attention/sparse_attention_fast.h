// Which of two ways sparse attention takes on CUDA; pure, so that tests can
// print it.
#pragma once

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

}  // namespace tapeline::cuda
