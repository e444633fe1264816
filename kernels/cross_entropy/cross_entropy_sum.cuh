// What the kernels of cross-entropy share: the order of a row's sum, so that
// its loss has the same bits whichever of them makes it, and the gradient.
//
// The packs of a row belong in turn to kRowThreads partial sums, each of which
// adds its own in ascending order. 32 neighbours join by a butterfly; of the
// kRowWarps results each lane joins those that are a warp apart, and then the
// lanes as before.
//
// Products and sums that meet are written with explicit rounding: fused in one
// kernel and not in another they would differ.
#pragma once

#include "kernels/cross_entropy/cross_entropy_fast.h"
#include "kernels/cuda_rows.cuh"
#include "kernels/hopper.cuh"

namespace tapeline::cuda::ce_detail {

constexpr int kRowWarps = kRowThreads / kWarp;
static_assert(kRowWarps % kWarp == 0);

__device__ inline float product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double product(double a, double b) { return __dmul_rn(a, b); }
__device__ inline float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double plus(double a, double b) { return __dadd_rn(a, b); }

// exp of what is at most about 0. For bf16 by exp2_fast(), whose error, and
// that of the product before it (2^-24 of the exponent, so more where the
// result is small), vanish in the rounding of the logits.
template <class T>
__device__ Accumulator<T> exp_of(Accumulator<T> x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return exp2_fast(product(x, kLog2e));
  } else {
    return exp(x);
  }
}

// sum exp(x - reference), and the maximum it refers to. Starts from nothing.
template <class T>
struct ExpSum {
  using A = Accumulator<T>;
  A max = A(-INFINITY), sum = 0;

  // While all is -inf there is nothing to subtract: exp(-inf - 0) is 0, but
  // -inf - -inf would be NaN. NaNs among the logits reach the sum.
  __device__ static A reference(A max) { return max == A(-INFINITY) ? 0 : max; }

  // The elements of v that lie below n, the first of which is element `first`.
  template <int kN>
  __device__ void add(const Pack<T, kN>& v, int64_t first, int64_t n) {
    A top = max;
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      if (first + e < n) top = fmax(top, A(load(v.at[e])));
    }
    const A from = reference(top);
    if (top > max) {
      sum = product(sum, exp_of<T>(max - from));
      max = top;
    }
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      if (first + e < n) sum = plus(sum, exp_of<T>(load(v.at[e]) - from));
    }
  }
  // The same whichever of the two is this one: all lanes of a butterfly agree.
  __device__ void join(A other_max, A other_sum) {
    const A top = fmax(max, other_max), from = reference(top);
    sum = plus(product(sum, exp_of<T>(max - from)),
               product(other_sum, exp_of<T>(other_max - from)));
    max = top;
  }
  __device__ void join_warp() {
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const A other_max = __shfl_xor_sync(~0u, max, step);
      const A other_sum = __shfl_xor_sync(~0u, sum, step);
      join(other_max, other_sum);
    }
  }
  // An infinite maximum is the answer itself.
  __device__ A lse() const { return isinf(max) ? max : plus(max, log(sum)); }
};

// The row's sum from those of its warps, part(i) of warp i, in every lane.
template <class T, class F>
__device__ ExpSum<T> join_row(F part) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  ExpSum<T> row{part(lane).x, part(lane).y};
#pragma unroll
  for (int i = kWarp; i < kRowWarps; i += kWarp) {
    row.join(part(lane + i).x, part(lane + i).y);
  }
  row.join_warp();
  return row;
}

// The gradient of the logits in v; the label is element `at` of them, if any.
template <class T, int kN>
__device__ Pack<T, kN> gradient(const Pack<T, kN>& v, int at,
                                Accumulator<T> lse, Accumulator<T> weight) {
  Accumulator<T> probability[kN];
#pragma unroll
  for (int e = 0; e < kN; ++e) {
    probability[e] = exp_of<T>(load(v.at[e]) - lse);
  }
  if (at >= 0 && at < kN) {
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      if (e == at) probability[e] -= 1;
    }
  }
  Pack<T, kN> d;
  if constexpr (std::is_same_v<T, bf16>) {
#pragma unroll
    for (int e = 0; e < kN; e += 2) {  // store() of two in one instruction
      const __nv_bfloat162 pair = __floats2bfloat162_rn(
          weight * probability[e], weight * probability[e + 1]);
      memcpy(&d.at[e], &pair, sizeof(pair));
    }
  } else {
#pragma unroll
    for (int e = 0; e < kN; ++e) store(d.at[e], weight * probability[e]);
  }
  return d;
}

}  // namespace tapeline::cuda::ce_detail
