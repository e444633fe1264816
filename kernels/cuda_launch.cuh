// Launches that begin before the kernel ahead of them in the stream has ended
// (programmatic dependent launch): what a kernel costs to start passes
// meanwhile.
//
// Such a kernel calls wait_for_earlier() in every thread before it touches what
// earlier kernels touch; from there on all that was queued before it has ended
// and is visible. The kernel ahead may call let_next_begin() after that: once
// each of its blocks has called or ended, blocks of the next one take what room
// there is. What the kernel ahead has waited for, the next may read at once.
// Both calls are nothing in kernels that were launched otherwise.
#pragma once

#include <type_traits>

#include "kernels/cuda.cuh"

namespace tapeline::cuda {

__device__ inline void wait_for_earlier() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ inline void let_next_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// `cluster`: blocks of a cluster.
template <class... P>
void launch_early(const Launch& l, void (*kernel)(P...), dim3 blocks,
                  unsigned threads, size_t shared, unsigned cluster,
                  const std::type_identity_t<P>&... args) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream_of(l);
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  cudaLaunchKernelEx(&config, kernel, args...);  // check_launch() sees errors
}

}  // namespace tapeline::cuda
