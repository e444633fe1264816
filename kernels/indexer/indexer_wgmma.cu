#include <algorithm>

#include "kernels/indexer/indexer_wgmma.cuh"
#include "kernels/indexer/indexer_wgmma.h"
#include "kernels/top_k/top_k_radix.h"

namespace tapeline::cuda {
namespace {

using indexer_detail::Problem;
using indexer_detail::score_tiles;
using indexer_detail::Shared;

template <int kHeads, int kDim>
void launch_tiles(Launch l, const IndexerPlan& plan,
                  const View<const bf16>& q_THD, const View<const bf16>& k_SD,
                  const Problem& x) {
  // 8 stages of 16 KB beside 64 KB of queries.
  constexpr int kStages = 8;
  constexpr int kShared = sizeof(Shared<kDim, kStages>);
  const auto kernel = score_tiles<kHeads, kDim, kStages>;
  static const cudaError_t opted_in = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  CHECK(opted_in == cudaSuccess) << cudaGetErrorString(opted_in);
  constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUtensorMap q_map = tensor_map(
      kType, q_THD.data, {q_THD.size(2), q_THD.size(1), q_THD.size(0)},
      {q_THD.strides[1] * 2, q_THD.strides[0] * 2},
      {64, kHeads, kIndexerColumns / kHeads});
  const CUtensorMap k_map =
      tensor_map(kType, k_SD.data, {k_SD.size(1), k_SD.size(0)},
                 {k_SD.strides[0] * 2}, {64, kIndexerTile});
  const dim3 grid(
      static_cast<unsigned>(ceil_div(q_THD.size(0), plan.queries())),
      static_cast<unsigned>(ceil_div(k_SD.size(0), plan.chunk)));
  kernel<<<grid, 384, kShared, stream_of(l)>>>(q_map, k_map, x);
  check_launch("indexer_scores");
}

template <int kDim>
void launch_heads(Launch l, const IndexerPlan& plan,
                  const View<const bf16>& q_THD, const View<const bf16>& k_SD,
                  const Problem& x) {
  switch (plan.padded_heads) {
    case 8:
      return launch_tiles<8, kDim>(l, plan, q_THD, k_SD, x);
    case 16:
      return launch_tiles<16, kDim>(l, plan, q_THD, k_SD, x);
    case 32:
      return launch_tiles<32, kDim>(l, plan, q_THD, k_SD, x);
    case 64:
      return launch_tiles<64, kDim>(l, plan, q_THD, k_SD, x);
    default:
      return launch_tiles<128, kDim>(l, plan, q_THD, k_SD, x);
  }
}

void score(Launch l, const IndexerPlan& plan, const View<const bf16>& q_THD,
           const View<const bf16>& k_SD, const View<const float>& w_TH,
           const KeyRange& range, double scale, const View<float>& scores_TS,
           bool fill) {
  const Problem x{rows<2>(w_TH),
                  rows<1>(range.begin),
                  rows<1>(range.end),
                  static_cast<float>(scale),
                  static_cast<int>(q_THD.size(0)),
                  static_cast<int>(q_THD.size(1)),
                  static_cast<int>(k_SD.size(0)),
                  static_cast<int>(plan.chunk),
                  scores_TS.data,
                  scores_TS.strides[0],
                  fill};
  if (q_THD.size(2) <= 64) return launch_heads<64>(l, plan, q_THD, k_SD, x);
  launch_heads<128>(l, plan, q_THD, k_SD, x);
}

}  // namespace

IndexerPlan indexer_plan(const View<const bf16>& q_THD,
                         const View<const bf16>& k_SD, double scale) {
  return indexer_plan({true, reinterpret_cast<uintptr_t>(q_THD.data),
                       reinterpret_cast<uintptr_t>(k_SD.data), q_THD.size(0),
                       q_THD.size(1), q_THD.size(2), k_SD.size(0),
                       q_THD.strides[0], q_THD.strides[1], k_SD.strides[0],
                       scale});
}

void indexer_scores_wgmma(Launch l, const IndexerPlan& plan,
                          View<const bf16> q_THD, View<const bf16> k_SD,
                          View<const float> w_TH, KeyRange range, double scale,
                          View<float> scores_TS) {
  score(l, plan, q_THD, k_SD, w_TH, range, scale, scores_TS, true);
}

void indexer_select_wgmma(Launch l, View<const bf16> q_THD,
                          View<const bf16> k_SD, View<const float> w_TH,
                          KeyRange range, double scale, int selected,
                          View<int32_t> ids_TK, int64_t rows_in_workspace,
                          std::byte* workspace) {
  const int64_t tokens = q_THD.size(0), keys = k_SD.size(0);
  const TopKPlan top_k = top_k_plan(true, keys, selected);
  CHECK(top_k.radix) << "[indexer_select] " << keys << " keys, " << selected
                     << " selected";
  for (int64_t t = 0; t < tokens; t += rows_in_workspace) {
    const int64_t end = std::min(tokens, t + rows_in_workspace);
    const View<const bf16> q = q_THD.slice(0, t, end);
    const KeyRange part{range.begin.slice(0, t, end),
                        range.end.slice(0, t, end)};
    const View<float> scores(reinterpret_cast<float*>(workspace),
                             {end - t, keys});
    // What lies outside of ranges is not read, so it is not written either.
    score(l, indexer_plan(q, k_SD, scale), q, k_SD, w_TH.slice(0, t, end), part,
          scale, scores, false);
    top_k_radix(l, top_k, scores, part, selected, ids_TK.slice(0, t, end));
  }
}

}  // namespace tapeline::cuda
