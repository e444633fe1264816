// The indexer in bf16 where indexer_plan says wgmma (indexer_fast.h).
#pragma once

#include <cstddef>

#include "kernels/attention/key_range.h"
#include "kernels/indexer/indexer_fast.h"
#include "kernels/kernel.h"

namespace tapeline::cuda {

IndexerPlan indexer_plan(const View<const bf16>& q_THD,
                         const View<const bf16>& k_SD, double scale);

void indexer_scores_wgmma(Launch l, const IndexerPlan& plan,
                          View<const bf16> q_THD, View<const bf16> k_SD,
                          View<const float> w_TH, KeyRange range, double scale,
                          View<float> scores_TS);

// Scores of `rows_in_workspace` queries at a time lie in the workspace.
// top_k(scores, range, ids) is called for each part.
void indexer_select_wgmma(Launch l, View<const bf16> q_THD,
                          View<const bf16> k_SD, View<const float> w_TH,
                          KeyRange range, double scale, int selected,
                          View<int32_t> ids_TK, int64_t rows_in_workspace,
                          std::byte* workspace);

}  // namespace tapeline::cuda
