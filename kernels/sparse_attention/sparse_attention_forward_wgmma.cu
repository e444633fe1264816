#include "kernels/sparse_attention/sparse_attention_forward_wgmma.cuh"
#include "kernels/sparse_attention/sparse_attention_wgmma.h"

namespace tapeline::cuda {
namespace {

template <class T>
bool aligned(const View<T>& x) {
  bool all = reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  for (int i = 0; i + 1 < x.rank(); ++i) {
    all = all && (x.size(i) <= 1 || x.strides[i] % 8 == 0);
  }
  return all;
}

}  // namespace

SparseAttentionPath sparse_attention_path(const View<const bf16>& q_THD,
                                          const View<const bf16>& kv_SD,
                                          const View<const int32_t>& ids_TK,
                                          const View<const bf16>& o_THV,
                                          double scale) {
  return sparse_attention_path({true, q_THD.size(2), o_THV.size(2),
                                ids_TK.size(1), scale,
                                aligned(q_THD) && aligned(kv_SD) &&
                                    aligned(o_THV) && kv_SD.size(0) > 0});
}

void sparse_attention_forward_wgmma(Launch l, View<const bf16> q_THD,
                                    View<const bf16> kv_SD,
                                    View<const int32_t> ids_TK, double scale,
                                    View<bf16> o_THV, View<float> lse_TH) {
  using sparse_detail::ForwardProblem;
  using sparse_detail::ForwardShared;
  const int64_t tokens = q_THD.size(0), heads = q_THD.size(1);
  if (tokens == 0 || heads == 0) return;
  static_assert(sizeof(ForwardShared) <= 227 << 10);
  static const cudaError_t opted_in = cudaFuncSetAttribute(
      sparse_detail::forward_tiles, cudaFuncAttributeMaxDynamicSharedMemorySize,
      sizeof(ForwardShared));
  CHECK(opted_in == cudaSuccess) << cudaGetErrorString(opted_in);
  // A stride that is never taken may be anything, but not for TMA.
  const int64_t head_stride = heads > 1 ? q_THD.strides[1] : kMlaDim;
  const int64_t stride = tokens > 1 ? q_THD.strides[0] : heads * head_stride;
  const CUtensorMap q_map = tensor_map(
      CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, q_THD.data, {kMlaDim, heads, tokens},
      {head_stride * 2, stride * 2}, {64, kMlaHeads, 1});
  const int64_t head_blocks = ceil_div(heads, kMlaHeads);
  const ForwardProblem problem{kv_SD.data,
                               kv_SD.strides[0],
                               static_cast<int>(kv_SD.size(0)),
                               static_cast<int>(heads),
                               static_cast<int>(head_blocks),
                               static_cast<int>(ids_TK.size(1)),
                               rows<2>(ids_TK),
                               static_cast<float>(scale),
                               rows<3>(o_THV),
                               rows<2>(lse_TH)};
  sparse_detail::forward_tiles<<<static_cast<unsigned>(tokens * head_blocks),
                                 384, sizeof(ForwardShared), stream_of(l)>>>(
      q_map, problem);
  check_launch("sparse_attention_forward");
}

}  // namespace tapeline::cuda
