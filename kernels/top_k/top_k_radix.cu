#include "kernels/top_k/top_k_radix.cuh"
#include "kernels/top_k/top_k_radix.h"

namespace tapeline::cuda {

void top_k_radix(Launch l, const TopKPlan& plan, View<const float> scores_NS,
                 KeyRange range, int k, View<int32_t> ids_NK) {
  const auto blocks = static_cast<unsigned>(scores_NS.size(0));
  if (blocks == 0 || k == 0) return;
  Rows<const int32_t, 1> begin{}, end{};
  if (range.begin) {
    begin = rows<1>(range.begin);
    end = rows<1>(range.end);
  }
  const int64_t stride = scores_NS.strides[0];
  const bool aligned =
      reinterpret_cast<uintptr_t>(scores_NS.data) % 16 == 0 && stride % 4 == 0;
  // 42 registers a thread hold four packs in flight.
  const auto kernel = top_k_radix_detail::select_rows<512, 3>;
  static const cudaError_t opted_in = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10);
  CHECK(opted_in == cudaSuccess) << cudaGetErrorString(opted_in);
  kernel<<<blocks, plan.threads, plan.shared_bytes, stream_of(l)>>>(
      scores_NS.data, stride, static_cast<int>(scores_NS.size(1)), aligned,
      begin, end, k, plan.capacity, ids_NK.data, ids_NK.strides[0]);
  check_launch("top_k");
}

}  // namespace tapeline::cuda
