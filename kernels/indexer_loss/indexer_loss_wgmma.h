// The indexer's loss in bf16 where indexer_loss_fast.h says wgmma.
#pragma once

#include <cstddef>

#include "kernels/indexer_loss/indexer_loss_fast.h"
#include "kernels/kernel.h"

namespace tapeline::cuda {

void indexer_loss_forward_wgmma(Launch l, View<const bf16> qI_THD,
                                View<const bf16> kI_SD, View<const float> w_TH,
                                double index_scale, View<const bf16> q_THD,
                                View<const bf16> kv_SD,
                                View<const float> lse_TH,
                                double attention_scale,
                                View<const int32_t> ids_TK, View<float> loss_T,
                                View<float> dscore_TK, View<float> target_TK);

// `plan` is indexer_loss_plan of the shapes, or one of other chunks: the bits
// of dkI depend on it, as each chunk's rows of a key are added in segments.
void indexer_loss_backward_wgmma(
    Launch l, const IndexerLossPlan& plan, View<const float> dscore_TK,
    View<const float> dloss_T, View<const bf16> qI_THD, View<const bf16> kI_SD,
    View<const float> w_TH, double index_scale, View<const int32_t> ids_TK,
    View<const int32_t> inverse_offsets_S1, View<const int32_t> inverse_entries,
    View<bf16> dqI_THD, View<bf16> dkI_SD, View<float> dw_TH,
    std::byte* workspace);

}  // namespace tapeline::cuda
