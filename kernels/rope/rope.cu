#include <algorithm>

#include "kernels/cuda_rows.cuh"
#include "kernels/rope/rope_cuda.h"

namespace tapeline::cuda {
namespace {

constexpr int kThreads = 256;
// Heads per thread, which share its angles. With more, fewer threads fit into
// the registers, and reads alternate with writes.
constexpr int kHeads = 2;

// Frequencies come from the host and travel as an argument of the kernel.
constexpr int kFrequencies = 256;
struct Frequencies {
  float at[kFrequencies];
};

__global__ void __launch_bounds__(kThreads)
    rope_table_kernel(Rows<const int32_t, 1> positions, Frequencies inverse,
                      int64_t first, int count, double factor,
                      Rows<float, 2> cosines, Rows<float, 2> sines) {
  const Division at =
      divide(int64_t{blockIdx.x} * kThreads + threadIdx.x, count);
  const int64_t t = at.quotient, j = first + at.rest;
  if (t >= positions.size[0]) return;
  const double angle = static_cast<float>(positions(t)) * inverse.at[at.rest];
  double s, c;
  sincos(angle, &s, &c);
  cosines(t, j) = static_cast<float>(c * factor);
  sines(t, j) = static_cast<float>(s * factor);
}

// Pack j of the first and of the second elements of a head's pairs.
template <bool kWhole, bool kInterleaved, int kN, class T>
__device__ void load_pairs(T* head, int64_t j, int64_t half,
                           Pack<std::remove_const_t<T>, kN> (&out)[2]) {
  if constexpr (kInterleaved) {
    Pack<std::remove_const_t<T>, kN> in[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      in[i] = load_pack_once<kWhole, kN>(head, 2 * j + i, 2 * half);
    }
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      out[0].at[e] = in[2 * e / kN].at[2 * e % kN];
      out[1].at[e] = in[(2 * e + 1) / kN].at[(2 * e + 1) % kN];
    }
  } else {
    out[0] = load_pack_once<kWhole, kN>(head, j, half);
    out[1] = load_pack_once<kWhole, kN>(head + half, j, half);
  }
}
template <bool kWhole, bool kInterleaved, int kN, class T>
__device__ void store_pairs(T* head, int64_t j, int64_t half,
                            const Pack<T, kN> (&from)[2]) {
  if constexpr (kInterleaved) {
    Pack<T, kN> out[2];
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      out[2 * e / kN].at[2 * e % kN] = from[0].at[e];
      out[(2 * e + 1) / kN].at[(2 * e + 1) % kN] = from[1].at[e];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      store_pack_once<kWhole>(head, 2 * j + i, 2 * half, out[i]);
    }
  } else {
    store_pack_once<kWhole>(head, j, half, from[0]);
    store_pack_once<kWhole>(head + half, j, half, from[1]);
  }
}

// One thread has one pack of pairs in kHeads neighbouring heads of a token.
// Forward reads pairs as they come and writes halves; backward reads halves and
// turns back.
template <bool kWhole, bool kInterleaved, bool kBackward, class T>
__global__ void __launch_bounds__(kThreads, 4)
    rope_kernel(Rows<const T, 3> in, Rows<const float, 2> cosines,
                Rows<const float, 2> sines, Rows<T, 3> out) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize;
  const int64_t heads = in.size[1], half = cosines.size[1];
  const int64_t packs = (half + kN - 1) / kN;
  const int64_t groups = (heads + kHeads - 1) / kHeads;
  const Division by_pack =
      divide(int64_t{blockIdx.x} * kThreads + threadIdx.x, packs);
  const Division by_group = divide(by_pack.quotient, groups);
  const int64_t t = by_group.quotient, j = by_pack.rest;
  const int64_t first = by_group.rest * kHeads;
  if (t >= in.size[0]) return;
  Pack<T> x[kHeads][2];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (first + h >= heads) continue;
    const T* head = in.row(t) + (first + h) * in.stride[1];
    load_pairs<kWhole, kInterleaved && !kBackward, kN>(head, j, half, x[h]);
  }
  const Pack<float, kN> c = load_pack<kWhole, kN>(cosines.row(t), j, half);
  const Pack<float, kN> s = load_pack<kWhole, kN>(sines.row(t), j, half);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (first + h >= heads) continue;
    Pack<T> y[2];
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      const A a = load(x[h][0].at[e]), b = load(x[h][1].at[e]);
      const A cosine = A(c.at[e]), sine = A(kBackward ? -s.at[e] : s.at[e]);
      store(y[0].at[e], a * cosine - b * sine);
      store(y[1].at[e], b * cosine + a * sine);
    }
    T* head = out.row(t) + (first + h) * out.stride[1];
    store_pairs<kWhole, kInterleaved && kBackward>(head, j, half, y);
  }
}

template <bool kBackward, class T>
void launch_turn(const Launch& l, const View<const T>& in,
                 const View<const float>& cos, const View<const float>& sin,
                 bool interleaved, const View<T>& out) {
  constexpr int kN = Pack<T>::kSize;
  const int64_t half = cos.size(1);
  const int64_t items =
      in.size(0) * ceil_div(in.size(1), kHeads) * ceil_div(half, kN);
  const auto blocks = static_cast<unsigned>(ceil_div(items, kThreads));
  if (blocks == 0) return;
  const auto run = [&]<bool kWhole>() {
    const auto kernel = interleaved ? rope_kernel<kWhole, true, kBackward, T>
                                    : rope_kernel<kWhole, false, kBackward, T>;
    kernel<<<blocks, kThreads, 0, stream_of(l)>>>(rows<3>(in), rows<2>(cos),
                                                  rows<2>(sin), rows<3>(out));
  };
  // Halves begin on a pack too, and kN angles lie on as many floats.
  const auto angles = [&](const View<const float>& x) {
    return reinterpret_cast<uintptr_t>(x.data) % (kN * sizeof(float)) == 0 &&
           (x.size(0) <= 1 || x.strides[0] % kN == 0);
  };
  if (packable(in) && packable(View<const T>(out)) && half % kN == 0 &&
      angles(cos) && angles(sin)) {
    run.template operator()<true>();
  } else {
    run.template operator()<false>();
  }
}

}  // namespace

void rope_table(Launch l, View<const int32_t> positions,
                const std::vector<double>& inverse_frequencies, double factor,
                View<float> cos, View<float> sin) {
  const int64_t half = static_cast<int64_t>(inverse_frequencies.size());
  for (int64_t first = 0; first < half; first += kFrequencies) {
    const int64_t count = std::min<int64_t>(kFrequencies, half - first);
    Frequencies inverse{};
    for (int64_t j = 0; j < count; ++j) {
      inverse.at[j] = static_cast<float>(inverse_frequencies[first + j]);
    }
    const auto blocks =
        static_cast<unsigned>(ceil_div(positions.size(0) * count, kThreads));
    if (blocks == 0) return;
    rope_table_kernel<<<blocks, kThreads, 0, stream_of(l)>>>(
        rows<1>(positions), inverse, first, static_cast<int>(count), factor,
        rows<2>(cos), rows<2>(sin));
  }
  check_launch("rope_table");
}

template <class T>
void rope_forward(Launch l, View<const T> x, View<const float> cos,
                  View<const float> sin, bool interleaved, View<T> y) {
  launch_turn<false>(l, x, cos, sin, interleaved, y);
  check_launch("rope_forward");
}

template <class T>
void rope_backward(Launch l, View<const T> dy, View<const float> cos,
                   View<const float> sin, bool interleaved, View<T> dx) {
  launch_turn<true>(l, dy, cos, sin, interleaved, dx);
  check_launch("rope_backward");
}

#define TAPELINE_ROPE(T)                                                \
  template void rope_forward(Launch, View<const T>, View<const float>,  \
                             View<const float>, bool, View<T>);         \
  template void rope_backward(Launch, View<const T>, View<const float>, \
                              View<const float>, bool, View<T>);
TAPELINE_ROPE(float)
TAPELINE_ROPE(bf16)
TAPELINE_ROPE(double)
#undef TAPELINE_ROPE

}  // namespace tapeline::cuda
