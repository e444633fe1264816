// Sparse attention in bf16 where sparse_attention_path says wgmma
// (sparse_attention_fast.h).
#pragma once

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

}  // namespace tapeline::cuda
