// Loss and gradient in one launch (cross_entropy_fast.h): logits come from
// memory once and go there once. In between a thread has its packs in shared
// memory, the first one in registers, and no other thread touches them.
#include <utility>

#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/cross_entropy/cross_entropy_cuda.h"
#include "kernels/cross_entropy/cross_entropy_sum.cuh"
#include "kernels/hopper.cuh"

namespace tapeline::cuda {
namespace {

using namespace ce_detail;
namespace cg = cooperative_groups;

using Logits = Pack<bf16>;

// Whole packs wait in fewer registers than their elements.
__device__ Logits unpack(const uint4& bits) {
  Logits v;
  memcpy(&v, &bits, sizeof(v));
  return v;
}

// One cluster a token; the loads of a row are in flight together.
__global__ void __launch_bounds__(kBlockThreads, kBlocksAtOnce)
    cross_entropy_forward_backward_kernel(Rows<bf16, 2> logits,
                                          Rows<const int32_t, 1> labels,
                                          Rows<const float, 1> weight,
                                          Rows<float, 1> loss,
                                          Rows<float, 1> lse) {
  constexpr int kPacks = kMostPacks;
  extern __shared__ uint4 shared[];
  __shared__ float2 parts[kRowWarps];
  static_assert(sizeof(parts) == kWarpSumBytes && sizeof(uint4) == 16);
  const cg::cluster_group cluster = cg::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank());
  const int thread = rank * kBlockThreads + static_cast<int>(threadIdx.x);
  const int64_t t = blockIdx.x / kRowBlocks;
  const int packs = static_cast<int>(logits.size[1]) / Logits::kSize;
  bf16* x = logits.row(t);
  const int32_t label = labels(t);
  const auto zeros = [&] {
    for (int j = thread; j < packs; j += kRowThreads) {
      store_pack_once<true>(x, j, packs, Logits{});
    }
  };
  if (label == kIgnoredLabel) {
    if (thread == 0) loss(t) = lse(t) = 0;
    return zeros();
  }
  auto started = cluster.barrier_arrive();  // so that others may write here
  // Before the cluster meets, as gradients are written after that.
  const float at_label = thread == 0 ? load(x[label]) : 0;
  const uint4* from = reinterpret_cast<const uint4*>(x) + thread;
  const auto inside = [&](int k) { return thread + k * kRowThreads < packs; };
  const auto place = [&](int k) {  // of a pack after the first
    return shared + (k - 1) * kBlockThreads + threadIdx.x;
  };
  const uint4 first = __ldcs(from);  // a plan has more than one for all
#pragma unroll
  for (int k = 1; k < kPacks; ++k) {
    if (inside(k)) {
      copy_async(shared_address(place(k)), from + k * kRowThreads, true);
    }
    commit_copies();
  }
  ExpSum<bf16> sum;
  sum.add(unpack(first), 0, Logits::kSize);
  const auto add = [&]<int k>() {
    wait_copies<kPacks - 1 - k>();
    if (inside(k)) sum.add(unpack(*place(k)), 0, Logits::kSize);
  };
  [&]<int... k>(std::integer_sequence<int, k...>) {
    (add.template operator()<k + 1>(), ...);
  }
  (std::make_integer_sequence<int, kPacks - 1>());
  // Each block gets the parts of all, and joins them in the same order.
  sum.join_warp();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  cluster.barrier_wait(std::move(started));
  if (lane < kRowBlocks) {
    *cluster.map_shared_rank(&parts[thread / kWarp], lane) = {sum.max, sum.sum};
  }
  cluster.sync();
  sum = join_row<bf16>([&](int i) { return parts[i]; });
  const float z = sum.lse();
  if (thread == 0) {
    lse(t) = z;
    loss(t) = z - at_label;
  }
  const float w = weight(t);
  if (w == 0) return zeros();
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (!inside(k)) continue;
    const int at = thread + k * kRowThreads;
    store_pack_once<true>(x, at, packs,
                          gradient(unpack(k == 0 ? first : *place(k)),
                                   label - at * Logits::kSize, z, w));
  }
}

}  // namespace

void cross_entropy_clusters(Launch l, View<bf16> logits,
                            View<const int32_t> labels,
                            View<const float> weight, View<float> loss,
                            View<float> lse) {
  const int bytes =
      pack_bytes(cross_entropy_plan(true, true, logits.size(1)).packs);
  static const cudaError_t opted_in = cudaFuncSetAttribute(
      cross_entropy_forward_backward_kernel,
      cudaFuncAttributeMaxDynamicSharedMemorySize, pack_bytes(kMostPacks));
  CHECK(opted_in == cudaSuccess) << cudaGetErrorString(opted_in);
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kRowBlocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(kRowBlocks * logits.size(0)));
  config.blockDim = dim3(kBlockThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream_of(l);
  config.attrs = &cluster;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, cross_entropy_forward_backward_kernel,
                     rows<2>(logits), rows<1>(labels), rows<1>(weight),
                     rows<1>(loss), rows<1>(lse));
  check_launch("cross_entropy_forward_backward");
}

}  // namespace tapeline::cuda
