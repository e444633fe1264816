// Sparse attention in bf16 where sparse_attention_path says wgmma
// (sparse_attention_fast.h).
#pragma once

#include <cstddef>

#include "kernels/kernel.h"
#include "kernels/sparse_attention/sparse_attention_fast.h"

namespace tapeline::cuda {

SparseAttentionPath sparse_attention_path(const View<const bf16>& q_THD,
                                          const View<const bf16>& kv_SD,
                                          const View<const int32_t>& ids_TK,
                                          const View<const bf16>& o_THV,
                                          double scale);

void sparse_attention_forward_wgmma(Launch l, View<const bf16> q_THD,
                                    View<const bf16> kv_SD,
                                    View<const int32_t> ids_TK, double scale,
                                    View<bf16> o_THV, View<float> lse_TH);

// `plan` is sparse_backward_plan of the shapes, or one with a smaller chunk;
// results do not depend on the chunk.
void sparse_attention_backward_wgmma(
    Launch l, const SparseBackwardPlan& plan, View<const bf16> do_THV,
    View<const bf16> q_THD, View<const bf16> kv_SD, View<const int32_t> ids_TK,
    View<const bf16> o_THV, View<const float> lse_TH,
    View<const int32_t> inverse_offsets_S1, View<const int32_t> inverse_entries,
    double scale, View<bf16> dq_THD, View<bf16> dkv_SD, std::byte* workspace);

}  // namespace tapeline::cuda
