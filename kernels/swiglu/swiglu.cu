#include "kernels/cuda_rows.cuh"
#include "kernels/swiglu/swiglu_cuda.h"

namespace tapeline::cuda {
namespace {

// A thread has one pack: with more, fewer threads fit into the registers, and
// reads alternate with writes instead of mixing.
constexpr int kThreads = 256;

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
    swiglu_forward_kernel(Rows<const T, 2> gate, Rows<const T, 2> up,
                          Rows<T, 2> y, const int32_t* count) {
  constexpr int kN = Pack<T>::kSize;
  const int64_t f = gate.size[1];
  const auto [i, j] =
      divide(int64_t{blockIdx.x} * kThreads + threadIdx.x, (f + kN - 1) / kN);
  if (i >= row_count(gate.size[0], count)) return;
  const Pack<T> g = load_pack<kWhole, kN>(gate.row(i), j, f);
  const Pack<T> u = load_pack<kWhole, kN>(up.row(i), j, f);
  Pack<T> out;
#pragma unroll
  for (int e = 0; e < kN; ++e) {
    const auto v = load(g.at[e]);
    T gated;
    store(gated, over_one_plus_exp<T>(v, -v));
    store(out.at[e], load(gated) * load(u.at[e]));
  }
  store_pack<kWhole>(y.row(i), j, f, out);
}

template <bool kWhole, class T>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(Rows<const T, 2> dy, Rows<const T, 2> gate,
                           Rows<const T, 2> up, Rows<T, 2> dgate,
                           Rows<T, 2> dup, const int32_t* count) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize;
  const int64_t f = gate.size[1];
  const auto [i, j] =
      divide(int64_t{blockIdx.x} * kThreads + threadIdx.x, (f + kN - 1) / kN);
  if (i >= row_count(gate.size[0], count)) return;
  const Pack<T> d = load_pack<kWhole, kN>(dy.row(i), j, f);
  const Pack<T> g = load_pack<kWhole, kN>(gate.row(i), j, f);
  const Pack<T> u = load_pack<kWhole, kN>(up.row(i), j, f);
  Pack<T> dg, du;
#pragma unroll
  for (int e = 0; e < kN; ++e) {
    const A dj = load(d.at[e]), gj = load(g.at[e]), uj = load(u.at[e]);
    const A s = over_one_plus_exp<T>(A(1), -gj);
    store(dg.at[e], dj * uj * s * (1 + gj * (1 - s)));
    store(du.at[e], dj * (gj * s));
  }
  store_pack<kWhole>(dgate.row(i), j, f, dg);
  store_pack<kWhole>(dup.row(i), j, f, du);
}

const int32_t* last_of(const View<const int32_t>& rows) {
  return rows ? &rows(rows.size(0) - 1) : nullptr;
}

template <class T>
unsigned block_count(const View<const T>& x) {
  const int64_t packs = x.size(0) * ceil_div(x.size(1), Pack<T>::kSize);
  return static_cast<unsigned>(ceil_div(packs, kThreads));
}

}  // namespace

template <class T>
void swiglu_forward(Launch l, View<const T> gate, View<const T> up, View<T> y,
                    View<const int32_t> rows_limit) {
  const unsigned blocks = block_count(gate);
  if (blocks == 0) return;
  const auto run = [&]<bool kWhole>() {
    swiglu_forward_kernel<kWhole, T><<<blocks, kThreads, 0, stream_of(l)>>>(
        rows<2>(gate), rows<2>(up), rows<2>(y), last_of(rows_limit));
  };
  by_alignment(run, gate, up, View<const T>(y));
  check_launch("swiglu_forward");
}

template <class T>
void swiglu_backward(Launch l, View<const T> dy, View<const T> gate,
                     View<const T> up, View<T> dgate, View<T> dup,
                     View<const int32_t> rows_limit) {
  const unsigned blocks = block_count(gate);
  if (blocks == 0) return;
  const auto run = [&]<bool kWhole>() {
    swiglu_backward_kernel<kWhole, T><<<blocks, kThreads, 0, stream_of(l)>>>(
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
