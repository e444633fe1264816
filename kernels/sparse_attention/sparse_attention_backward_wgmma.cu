#include <algorithm>

#include "kernels/sparse_attention/sparse_attention_backward_wgmma.cuh"
#include "kernels/sparse_attention/sparse_attention_wgmma.h"

namespace tapeline::cuda {
namespace {

using sparse_detail::BackwardProblem;
using sparse_detail::BackwardShared;
using sparse_detail::heads_map;
using sparse_detail::SumProblem;

}  // namespace

void sparse_attention_backward_wgmma(
    Launch l, const SparseBackwardPlan& plan, View<const bf16> do_THV,
    View<const bf16> q_THD, View<const bf16> kv_SD, View<const int32_t> ids_TK,
    View<const bf16> o_THV, View<const float> lse_TH,
    View<const int32_t> inverse_offsets_S1, View<const int32_t> inverse_entries,
    double scale, View<bf16> dq_THD, View<bf16> dkv_SD, std::byte* workspace) {
  constexpr int kThreads = 256;
  const int64_t tokens = q_THD.size(0), heads = q_THD.size(1);
  const int64_t keys = kv_SD.size(0), slots = ids_TK.size(1);
  if (keys == 0) return;
  const auto stream = stream_of(l);
  auto* ids = reinterpret_cast<int32_t*>(workspace + plan.ids);
  auto* slot = reinterpret_cast<uint16_t*>(workspace + plan.slots);
  auto* counts = reinterpret_cast<int32_t*>(workspace + plan.counts);
  auto* key_rows = reinterpret_cast<bf16*>(workspace + plan.rows);
  SumProblem sum{key_rows,
                 0,
                 0,
                 static_cast<int>(plan.head_blocks),
                 static_cast<int>(keys),
                 rows<1>(inverse_offsets_S1),
                 rows<1>(inverse_entries),
                 reinterpret_cast<int32_t*>(workspace + plan.next),
                 reinterpret_cast<float*>(workspace + plan.sums),
                 dkv_SD.data,
                 dkv_SD.strides[0],
                 true,
                 false};
  const auto add_rows = [&] {
    const auto kernel = plan.head_blocks == 1   ? sparse_detail::sum_rows<1>
                        : plan.head_blocks == 2 ? sparse_detail::sum_rows<2>
                                                : sparse_detail::sum_rows<0>;
    kernel<<<static_cast<unsigned>(ceil_div(keys, sparse_detail::kSumKeys)),
             sparse_detail::kSumThreads * sparse_detail::kSumKeys, 0, stream>>>(
        sum);
    check_launch("sparse_attention_backward");
  };
  if (tokens == 0 || heads == 0 || slots == 0) {
    // No entry: every key's gradient is 0.
    sum.finish = true;
    add_rows();
    if (tokens == 0 || heads == 0) return;
  }
  sparse_detail::compact_rows<kThreads>
      <<<static_cast<unsigned>(tokens), kThreads, 0, stream>>>(
          rows<2>(ids_TK), static_cast<int>(slots), static_cast<int>(keys), ids,
          slot, counts);
  check_launch("sparse_attention_backward");
  static_assert(sizeof(BackwardShared) <= 227 << 10);
  static const cudaError_t opted_in = cudaFuncSetAttribute(
      sparse_detail::backward_tiles,
      cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(BackwardShared));
  CHECK(opted_in == cudaSuccess) << cudaGetErrorString(opted_in);
  BackwardProblem problem{kv_SD.data,
                          kv_SD.strides[0],
                          static_cast<int>(heads),
                          static_cast<int>(plan.head_blocks),
                          static_cast<int>(slots),
                          0,
                          ids,
                          slot,
                          counts,
                          rows<3>(do_THV),
                          rows<3>(o_THV),
                          rows<2>(lse_TH),
                          static_cast<float>(scale),
                          rows<3>(dq_THD),
                          key_rows};
  const CUtensorMap q_map = heads_map(q_THD), do_map = heads_map(do_THV);
  for (int64_t t = 0; t < tokens; t += plan.chunk) {
    const int64_t end = std::min(tokens, t + plan.chunk);
    problem.first = static_cast<int>(t);
    sparse_detail::
        backward_tiles<<<static_cast<unsigned>((end - t) * plan.head_blocks),
                         384, sizeof(BackwardShared), stream>>>(q_map, do_map,
                                                                problem);
    check_launch("sparse_attention_backward");
    if (slots == 0) continue;
    sum.first = static_cast<int>(t * slots);
    sum.last = static_cast<int>(end * slots);
    sum.from_zero = t == 0;
    sum.finish = end == tokens;
    add_rows();
  }
}

}  // namespace tapeline::cuda
