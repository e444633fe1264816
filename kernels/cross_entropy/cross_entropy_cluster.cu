// Loss and gradient in one launch (cross_entropy_fast.h): logits come from
// memory once and go there once.
#include <utility>

#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/cross_entropy/cross_entropy_cuda.h"
#include "kernels/cross_entropy/cross_entropy_sum.cuh"

namespace tapeline::cuda {
namespace {

using namespace ce_detail;
namespace cg = cooperative_groups;

using Logits = Pack<bf16>;
constexpr int kPacks = 5;  // whose loads are in flight together

// Whole packs wait in fewer registers than their elements.
__device__ Logits unpack(const uint4& bits) {
  Logits v;
  memcpy(&v, &bits, sizeof(v));
  return v;
}

// One cluster a token.
__global__ void __launch_bounds__(kBlockThreads, kBlocksAtOnce)
    forward_backward(Rows<bf16, 2> logits, Rows<const int32_t, 1> labels,
                     Rows<const float, 1> weight, Rows<float, 1> loss,
                     Rows<float, 1> lse) {
  __shared__ float2 parts[kRowWarps];
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
  const auto read = [&](int j) { return reinterpret_cast<const uint4*>(x)[j]; };
  ExpSum<bf16> sum;
  int j = thread;
  for (; j + (kPacks - 1) * kRowThreads < packs; j += kPacks * kRowThreads) {
    uint4 v[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) v[p] = read(j + p * kRowThreads);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) sum.add(unpack(v[p]), 0, Logits::kSize);
  }
  uint4 rest[kPacks - 1];
#pragma unroll
  for (int p = 0; p < kPacks - 1; ++p) {
    if (j + p * kRowThreads < packs) rest[p] = read(j + p * kRowThreads);
  }
#pragma unroll
  for (int p = 0; p < kPacks - 1; ++p) {
    if (j + p * kRowThreads < packs) sum.add(unpack(rest[p]), 0, Logits::kSize);
  }
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
  for (j = thread; j < packs; j += kPacks * kRowThreads) {
    uint4 v[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = j + p * kRowThreads;
      if (at < packs) v[p] = __ldcs(reinterpret_cast<const uint4*>(x) + at);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int at = j + p * kRowThreads;
      if (at >= packs) continue;
      store_pack_once<true>(
          x, at, packs,
          gradient(unpack(v[p]), label - at * Logits::kSize, z, w));
    }
  }
}

}  // namespace

void cross_entropy_clusters(Launch l, View<bf16> logits,
                            View<const int32_t> labels,
                            View<const float> weight, View<float> loss,
                            View<float> lse) {
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kRowBlocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(kRowBlocks * logits.size(0)));
  config.blockDim = dim3(kBlockThreads);
  config.stream = stream_of(l);
  config.attrs = &cluster;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, forward_backward, rows<2>(logits),
                     rows<1>(labels), rows<1>(weight), rows<1>(loss),
                     rows<1>(lse));
  check_launch("cross_entropy_forward_backward");
}

}  // namespace tapeline::cuda
