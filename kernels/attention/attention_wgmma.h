// Attention in bf16 where attention_path says wgmma (attention_fast.h).
//
// The contract of attention.h with three differences, all of what tensor cores
// do: probabilities and their gradients are rounded to bf16 before they are
// multiplied; dk and dv add heads in ascending order, and queries within a
// head; and a NaN in a key or value row, or in a query's row, may reach rows
// of its tile (128 queries, 128 keys) that do not see it. What no row of a tile
// sees, and what queries without keys hold, still reaches nothing.
#pragma once

#include <cstddef>

#include "kernels/attention/attention_fast.h"
#include "kernels/attention/key_range.h"
#include "kernels/kernel.h"

namespace tapeline::cuda {

AttentionPath attention_path(const View<const bf16>& q_THD,
                             const View<const bf16>& k_SGD,
                             const View<const bf16>& v_SGV,
                             const View<const bf16>& o_THV, double scale);

void attention_forward_wgmma(Launch l, View<const bf16> q_THD,
                             View<const bf16> k_SGD, View<const bf16> v_SGV,
                             KeyRange range, double scale, View<bf16> o_THV,
                             View<float> lse_TH);

// do, dq, dk and dv are aligned as attention_path asks of the others;
// `workspace` has attention_backward_plan(tokens, heads).bytes.
void attention_backward_wgmma(Launch l, View<const bf16> do_THV,
                              View<const bf16> q_THD, View<const bf16> k_SGD,
                              View<const bf16> v_SGV, View<const bf16> o_THV,
                              View<const float> lse_TH, KeyRange range,
                              double scale, View<bf16> dq_THD,
                              View<bf16> dk_SGD, View<bf16> dv_SGV,
                              std::byte* workspace);

}  // namespace tapeline::cuda
