#include "kernels/cuda_rows.cuh"
#include "kernels/swiglu/swiglu_cuda.h"

namespace tapeline::cuda {
namespace {

constexpr int kThreads = 256;
// Packs per thread whose loads are in flight together.
constexpr int kForwardPacks = 4, kBackwardPacks = 2;

// 1 / (1 + exp(-x)) and x times that. In bf16 the fast instructions' errors of
// some 2^-21 vanish; div.full holds over the whole range, unlike __fdividef.
template <class T>
__device__ Accumulator<T> over_one_plus_exp(Accumulator<T> x,
                                            Accumulator<T> minus) {
  using A = Accumulator<T>;
  if constexpr (std::is_same_v<T, bf16>) {
    float out;
    asm("div.full.f32 %0, %1, %2;"
        : "=f"(out)
        : "f"(x), "f"(1 + __expf(minus)));
    return out;
  } else {
    return x / (A(1) + exp(minus));
  }
}

// How many rows count.
__device__ int64_t row_count(int64_t capacity, const int32_t* count) {
  return count == nullptr ? capacity : int64_t{*count};
}

template <bool kWhole, class T>
__global__ void __launch_bounds__(kThreads)
    forward(Rows<const T, 2> gate, Rows<const T, 2> up, Rows<T, 2> y,
            const int32_t* count) {
  constexpr int kN = Pack<T>::kSize;
  const int64_t f = gate.size[1], packs = (f + kN - 1) / kN;
  const int64_t n = row_count(gate.size[0], count) * packs;
  const int64_t first =
      int64_t{blockIdx.x} * (kThreads * kForwardPacks) + threadIdx.x;
  if (first >= n) return;
  Division at[kForwardPacks];
  Pack<T> g[kForwardPacks], u[kForwardPacks];
#pragma unroll
  for (int p = 0; p < kForwardPacks; ++p) {
    const int64_t i = first + p * kThreads;
    at[p] = divide(i < n ? i : 0, packs);
    if (i >= n) continue;
    g[p] = load_pack<kWhole, kN>(gate.row(at[p].quotient), at[p].rest, f);
    u[p] = load_pack<kWhole, kN>(up.row(at[p].quotient), at[p].rest, f);
  }
#pragma unroll
  for (int p = 0; p < kForwardPacks; ++p) {
    if (first + p * kThreads >= n) continue;
    Pack<T> out;
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      const auto v = load(g[p].at[e]);
      T gated;
      store(gated, over_one_plus_exp<T>(v, -v));
      store(out.at[e], load(gated) * load(u[p].at[e]));
    }
    store_pack<kWhole>(y.row(at[p].quotient), at[p].rest, f, out);
  }
}

template <bool kWhole, class T>
__global__ void __launch_bounds__(kThreads)
    backward(Rows<const T, 2> dy, Rows<const T, 2> gate, Rows<const T, 2> up,
             Rows<T, 2> dgate, Rows<T, 2> dup, const int32_t* count) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize;
  const int64_t f = gate.size[1], packs = (f + kN - 1) / kN;
  const int64_t n = row_count(gate.size[0], count) * packs;
  const int64_t first =
      int64_t{blockIdx.x} * (kThreads * kBackwardPacks) + threadIdx.x;
  if (first >= n) return;
  Division at[kBackwardPacks];
  Pack<T> d[kBackwardPacks], g[kBackwardPacks], u[kBackwardPacks];
#pragma unroll
  for (int p = 0; p < kBackwardPacks; ++p) {
    const int64_t i = first + p * kThreads;
    at[p] = divide(i < n ? i : 0, packs);
    if (i >= n) continue;
    d[p] = load_pack<kWhole, kN>(dy.row(at[p].quotient), at[p].rest, f);
    g[p] = load_pack<kWhole, kN>(gate.row(at[p].quotient), at[p].rest, f);
    u[p] = load_pack<kWhole, kN>(up.row(at[p].quotient), at[p].rest, f);
  }
#pragma unroll
  for (int p = 0; p < kBackwardPacks; ++p) {
    if (first + p * kThreads >= n) continue;
    Pack<T> dg, du;
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      const A gj = load(g[p].at[e]), uj = load(u[p].at[e]);
      const A dj = load(d[p].at[e]);
      const A s = over_one_plus_exp<T>(A(1), -gj);
      store(dg.at[e], dj * uj * s * (1 + gj * (1 - s)));
      store(du.at[e], dj * (gj * s));
    }
    store_pack<kWhole>(dgate.row(at[p].quotient), at[p].rest, f, dg);
    store_pack<kWhole>(dup.row(at[p].quotient), at[p].rest, f, du);
  }
}

const int32_t* last_of(const View<const int32_t>& rows) {
  return rows ? &rows(rows.size(0) - 1) : nullptr;
}

template <class T>
unsigned block_count(const View<const T>& x, int packs_each) {
  const int64_t packs = x.size(0) * ceil_div(x.size(1), Pack<T>::kSize);
  return static_cast<unsigned>(ceil_div(packs, kThreads * packs_each));
}

}  // namespace

template <class T>
void swiglu_forward(Launch l, View<const T> gate, View<const T> up, View<T> y,
                    View<const int32_t> rows_limit) {
  const unsigned blocks = block_count(gate, kForwardPacks);
  if (blocks == 0) return;
  const auto run = [&]<bool kWhole>() {
    forward<kWhole, T><<<blocks, kThreads, 0, stream_of(l)>>>(
        rows<2>(gate), rows<2>(up), rows<2>(y), last_of(rows_limit));
  };
  by_alignment(run, gate, up, View<const T>(y));
  check_launch("swiglu_forward");
}

template <class T>
void swiglu_backward(Launch l, View<const T> dy, View<const T> gate,
                     View<const T> up, View<T> dgate, View<T> dup,
                     View<const int32_t> rows_limit) {
  const unsigned blocks = block_count(gate, kBackwardPacks);
  if (blocks == 0) return;
  const auto run = [&]<bool kWhole>() {
    backward<kWhole, T><<<blocks, kThreads, 0, stream_of(l)>>>(
        rows<2>(dy), rows<2>(gate), rows<2>(up), rows<2>(dgate), rows<2>(dup),
        last_of(rows_limit));
  };
  by_alignment(run, dy, gate, up, View<const T>(dgate), View<const T>(dup));
  check_launch("swiglu_backward");
}

#define TAPELINE_SWIGLU(T)                                                    \
  template void swiglu_forward(Launch, View<const T>, View<const T>, View<T>, \
                               View<const int32_t>);                          \
  template void swiglu_backward(Launch, View<const T>, View<const T>,         \
                                View<const T>, View<T>, View<T>,              \
                                View<const int32_t>);
TAPELINE_SWIGLU(float)
TAPELINE_SWIGLU(bf16)
TAPELINE_SWIGLU(double)
#undef TAPELINE_SWIGLU

}  // namespace tapeline::cuda
