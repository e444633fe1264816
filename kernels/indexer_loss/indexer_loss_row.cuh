// The end of a row, once scores and target are in shared memory: what the
// kernels of the indexer's loss share.
#pragma once

#include "kernels/cuda.cuh"
#include "kernels/cuda_tile.cuh"

namespace tapeline::cuda::loss_detail {

constexpr double kSmallest = 1e-10;  // of a probability under a logarithm

// The valid entries of a row, side by side, with the slots that they came from.
template <class A, class Slot>
struct Row {
  A *score, *target;
  const Slot* slot;
  int count;
};

// Turns sums over `heads` of probabilities into the target, and writes it to
// out [slots] unless that is null. By all threads of the block.
template <int kThreads, class A, class Slot>
__device__ void normalise_row(const Row<A, Slot>& row, int64_t heads,
                              int64_t slots, A* out) {
  A total = 0;
  for (int j = threadIdx.x; j < row.count; j += kThreads) {
    row.target[j] /= static_cast<A>(heads);
    total += row.target[j];
  }
  total = larger(block_sum<kThreads>(total), A(kSmallest));
  if (out != nullptr) {
    for (int64_t j = threadIdx.x; j < slots; j += kThreads) out[j] = 0;
    __syncthreads();
  }
  for (int j = threadIdx.x; j < row.count; j += kThreads) {
    row.target[j] /= total;
    if (out != nullptr) out[row.slot[j]] = row.target[j];
  }
}

// Writes the row's loss and dscore [slots]. By all threads of the block.
template <int kThreads, class A, class Slot>
__device__ void kl_row(const Row<A, Slot>& row, int64_t slots, A* loss,
                       A* dscore) {
  for (int64_t j = threadIdx.x; j < slots; j += kThreads) dscore[j] = 0;
  if (threadIdx.x == 0) *loss = 0;
  if (row.count == 0) return;
  A max = -infinity<A>();
  for (int j = threadIdx.x; j < row.count; j += kThreads) {
    max = larger(max, row.score[j]);
  }
  max = block_reduce<kThreads>(max, -infinity<A>(),
                               [](A a, A b) { return larger(a, b); });
  A sum = 0;
  for (int j = threadIdx.x; j < row.count; j += kThreads) {
    sum += exp(row.score[j] - max);
  }
  const A log_sum = max + log(block_sum<kThreads>(sum));
  A total = 0;
  for (int j = threadIdx.x; j < row.count; j += kThreads) {
    const A p = row.target[j];
    total += p * (log(larger(p, A(kSmallest))) - (row.score[j] - log_sum));
    dscore[row.slot[j]] = exp(row.score[j] - log_sum) - p;
  }
  total = block_sum<kThreads>(total);
  if (threadIdx.x == 0) *loss = total;
}

}  // namespace tapeline::cuda::loss_detail
