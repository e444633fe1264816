#include <algorithm>
#include <array>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/cuda_rows.cuh"
#include "kernels/elementwise/elementwise_cuda.h"
#include "kernels/elementwise/nest.h"

namespace tapeline::cuda {
namespace {

using internal::Nest;
using internal::nest;

constexpr int kThreads = 256;
// Packs per thread whose loads, of 64 bytes, are in flight together: with more,
// fewer threads fit and reads alternate with writes.
template <int kN, class... X>
constexpr int kPacks =
    sizeof...(X) == 0
        ? 4
        : static_cast<int>(std::clamp<size_t>(
              64 / std::max<size_t>(kN * (sizeof(X) + ... + 0), 1), 1, 4));

// A nest in device code, its inner dimension cut into packs of one size.
template <int N>
struct Loop {
  int outer;  // dimensions around the inner one
  int64_t size[Shape::kMaxRank];
  int64_t stride[N][Shape::kMaxRank];
  int64_t inner_packs, packs;

  struct Offsets {
    int64_t at[N];
  };
  // Where pack i begins in each operand.
  __device__ Offsets offsets(int64_t i, int per_pack) const {
    Offsets out;
    if (outer == 0) {
#pragma unroll
      for (int k = 0; k < N; ++k) out.at[k] = i * per_pack * stride[k][0];
      return out;
    }
    uint32_t rest = static_cast<uint32_t>(i);  // launch_packs() sees to that
    const auto take = [&](int64_t extent) {
      const uint32_t n = static_cast<uint32_t>(extent), all = rest;
      rest = all / n;
      return int64_t{all - rest * n};
    };
    const int64_t in_row = take(inner_packs) * per_pack;
#pragma unroll
    for (int k = 0; k < N; ++k) out.at[k] = in_row * stride[k][outer];
    for (int d = outer - 1; d >= 0; --d) {
      const int64_t here = d == 0 ? int64_t{rest} : take(size[d]);
#pragma unroll
      for (int k = 0; k < N; ++k) out.at[k] += here * stride[k][d];
    }
    return out;
  }
};

template <int N>
Loop<N> loop_of(const Nest<N>& from, int per_pack) {
  Loop<N> out{};
  out.outer = from.shape.rank() - 1;
  for (int d = 0; d <= out.outer; ++d) {
    out.size[d] = from.shape[d];
    for (int k = 0; k < N; ++k) out.stride[k][d] = from.strides[k][d];
  }
  out.inner_packs = from.inner() / per_pack;
  out.packs = from.rows() * out.inner_packs;
  return out;
}

template <int kN, class F, size_t... I, class Y, class... X>
__device__ void map_some(F f, const Loop<1 + sizeof...(X)>& loop,
                         std::index_sequence<I...>, Y* y, const X*... x) {
  constexpr int kEach = kPacks<kN, X...>;
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kEach) + threadIdx.x;
  std::tuple<Pack<X, kN>...> in[kEach];
  int64_t to[kEach];
#pragma unroll
  for (int p = 0; p < kEach; ++p) {
    const int64_t i = first + p * kThreads;
    if (i >= loop.packs) continue;
    const auto offsets = loop.offsets(i, kN);
    to[p] = offsets.at[0];
    ((std::get<I>(in[p]) =
          *reinterpret_cast<const Pack<X, kN>*>(x + offsets.at[I + 1])),
     ...);
  }
#pragma unroll
  for (int p = 0; p < kEach; ++p) {
    if (first + p * kThreads >= loop.packs) continue;
    Pack<Y, kN> out;
#pragma unroll
    for (int e = 0; e < kN; ++e) out.at[e] = f(std::get<I>(in[p]).at[e]...);
    *reinterpret_cast<Pack<Y, kN>*>(y + to[p]) = out;
  }
}
// y = f(x...) for packs of kN elements that lie side by side in all operands.
// An input may be y.
template <int kN, class F, class Y, class... X>
__global__ void __launch_bounds__(kThreads)
    map_packs(F f, const __grid_constant__ Loop<1 + sizeof...(X)> loop, Y* y,
              const X*... x) {
  map_some<kN>(f, loop, std::index_sequence_for<X...>(), y, x...);
}

template <int kN, class F, class Y, class... X>
void launch_packs(const Launch& l, F f, const Nest<1 + sizeof...(X)>& from,
                  Y* y, const X*... x) {
  const auto loop = loop_of(from, kN);
  if (loop.packs == 0) return;
  if (loop.outer > 0 && loop.packs > std::numeric_limits<int32_t>::max()) {
    // Indices are divided in 32 bits: one half of the rows after the other.
    CHECK_GE(from.shape[0], 2);
    auto half = from, rest = from;
    half.shape[0] /= 2;
    rest.shape[0] -= half.shape[0];
    int k = 1;
    [[maybe_unused]] const auto moved = [&](auto* p) {
      return p + half.shape[0] * from.strides[k++][0];
    };
    const std::tuple<const X*...> second{moved(x)...};  // braces: in order
    launch_packs<kN>(l, f, half, y, x...);
    std::apply(
        [&](const X*... p) {
          launch_packs<kN>(l, f, rest, y + half.shape[0] * from.strides[0][0],
                           p...);
        },
        second);
    return;
  }
  const auto blocks =
      static_cast<unsigned>(ceil_div(loop.packs, kThreads * kPacks<kN, X...>));
  map_packs<kN><<<blocks, kThreads, 0, stream_of(l)>>>(f, loop, y, x...);
}

// Whether operand k of the nest can be walked in packs of kN.
template <int kN, int N, class T>
bool packs_fit(const Nest<N>& from, int k, const T* data) {
  if (reinterpret_cast<uintptr_t>(data) % (kN * sizeof(T)) != 0) return false;
  if (from.strides[k][-1] != 1) return false;
  for (int d = 0; d + 1 < from.shape.rank(); ++d) {
    if (from.strides[k][d] % kN != 0) return false;
  }
  return true;
}

// y = f(x...) at every index.
template <class F, class Y, class... X>
void map(const char* op, const Launch& l, F f, const View<Y>& y,
         const View<const X>&... x) {
  if (y.elements() == 0) return;
  constexpr int kN = static_cast<int>(16 / std::max({sizeof(Y), sizeof(X)...}));
  const auto all = nest<1 + sizeof...(X)>(y.shape, {y.strides, x.strides...});
  int k = 1;
  const bool flat = all.shape.rank() == 1;
  const bool packs = packs_fit<kN>(all, 0, y.data) &&
                     (packs_fit<kN>(all, k++, x.data) && ...) &&
                     (flat || all.inner() % kN == 0);
  if (packs) {
    launch_packs<kN>(l, f, all, y.data, x.data...);
    // What is left of the only row.
    const int64_t done = all.inner() / kN * kN;
    if (done < all.inner()) {
      auto rest = all;
      rest.shape[-1] -= done;
      launch_packs<1>(l, f, rest, y.data + done, (x.data + done)...);
    }
  } else {
    launch_packs<1>(l, f, all, y.data, x.data...);
  }
  check_launch(op);
}

template <class T, class A>
__device__ T rounded(A value) {
  T out;
  store(out, value);
  return out;
}

template <class T>
struct Add {
  __device__ T operator()(T a, T b) const {
    return rounded<T>(load(a) + load(b));
  }
};
template <class T>
struct Mul {
  __device__ T operator()(T a, T b) const {
    return rounded<T>(load(a) * load(b));
  }
};
template <class X, class Y>
struct Axpy {
  using A = Accumulator<Y>;
  A alpha;
  __device__ Y operator()(X x, Y y) const {
    return rounded<Y>(fma(alpha, static_cast<A>(load(x)), A(load(y))));
  }
};
template <class T>
struct Scale {
  Accumulator<T> alpha;
  __device__ T operator()(T x) const { return rounded<T>(alpha * load(x)); }
};
template <class A, class B>
struct Cast {
  __device__ B operator()(A x) const {
    if constexpr (std::is_integral_v<A>) {
      return static_cast<B>(x);
    } else {
      return rounded<B>(static_cast<Accumulator<B>>(load(x)));
    }
  }
};
template <class T>
struct Same {
  __device__ T operator()(T x) const { return x; }
};
template <class T>
struct Constant {
  T value;
  __device__ T operator()() const { return value; }
};

// One cluster, whose threads take packs of the elements' order in turn. kWhole:
// the elements lie side by side, on a pack; the order of sums is the same.
constexpr int kSumThreads = 1024;
template <bool kWhole, class T>
__global__ void __launch_bounds__(kSumThreads)
    elementwise_sum_kernel(const __grid_constant__ Loop<1> loop, const T* x,
                           Accumulator<T>* y) {
  using A = Accumulator<T>;
  constexpr int kN = Pack<T>::kSize;
  constexpr int64_t kStep = int64_t{kCluster} * kSumThreads;
  const int64_t full = kWhole ? loop.packs / kN : 0;  // packs
  A sum[kN] = {};
  int64_t i = int64_t{blockIdx.x} * kSumThreads + threadIdx.x;
#pragma unroll 8
  for (; i < full; i += kStep) {
    const Pack<T> v = reinterpret_cast<const Pack<T>*>(x)[i];
#pragma unroll
    for (int e = 0; e < kN; ++e) sum[e] += load(v.at[e]);
  }
  for (; i * kN < loop.packs; i += kStep) {
#pragma unroll
    for (int e = 0; e < kN; ++e) {
      if (i * kN + e >= loop.packs) break;
      sum[e] += load(x[loop.offsets(i * kN + e, 1).at[0]]);
    }
  }
  A all = 0;
#pragma unroll
  for (int e = 0; e < kN; ++e) all += sum[e];
  const A total = cluster_sum(block_sum<kSumThreads>(all));
  if (blockIdx.x == 0 && threadIdx.x == 0) *y = total;
}

}  // namespace

template <class T>
void add(Launch l, View<const T> a, View<const T> b, View<T> y) {
  map("add", l, Add<T>(), y, a, b);
}
template <class T>
void mul(Launch l, View<const T> a, View<const T> b, View<T> y) {
  map("mul", l, Mul<T>(), y, a, b);
}
template <class T>
void accumulate(Launch l, View<const T> x, View<T> y) {
  map("accumulate", l, Add<T>(), y, View<const T>(y), x);
}
template <class X, class Y>
void axpy(Launch l, double alpha, View<const X> x, View<Y> y) {
  const Axpy<X, Y> f = {static_cast<Accumulator<Y>>(alpha)};
  map("axpy", l, f, y, x, View<const Y>(y));
}
template <class T>
void scale(Launch l, double alpha, View<const T> x, View<T> y) {
  map("scale", l, Scale<T>{static_cast<Accumulator<T>>(alpha)}, y, x);
}
template <class A, class B>
void cast(Launch l, View<const A> x, View<B> y) {
  map("cast", l, Cast<A, B>(), y, x);
}
template <class T>
void copy(Launch l, View<const T> x, View<T> y) {
  map("copy", l, Same<T>(), y, x);
}
template <class T>
void fill(Launch l, double value, View<T> y) {
  if constexpr (std::is_same_v<T, bf16>) {
    map("fill", l, Constant<T>{bf16(static_cast<float>(value))}, y);
  } else {
    map("fill", l, Constant<T>{static_cast<T>(value)}, y);
  }
}
template <class T>
void sum(Launch l, View<const T> x, View<Accumulator<T>> y) {
  Loop<1> loop{};
  if (x.elements() > 0) loop = loop_of(nest<1>(x.shape, {x.strides}), 1);
  CHECK(loop.outer == 0 || loop.packs <= std::numeric_limits<int32_t>::max())
      << "[sum] x is " << describe(x);
  const bool whole = loop.outer == 0 && loop.stride[0][0] == 1 &&
                     reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  launch_clusters(l,
                  whole ? elementwise_sum_kernel<true, T>
                        : elementwise_sum_kernel<false, T>,
                  dim3(kCluster), kSumThreads, 0, loop, x.data, y.data);
  check_launch("sum");
}

#define TAPELINE_FLOAT(T)                                           \
  template void add(Launch, View<const T>, View<const T>, View<T>); \
  template void mul(Launch, View<const T>, View<const T>, View<T>); \
  template void accumulate(Launch, View<const T>, View<T>);         \
  template void scale(Launch, double, View<const T>, View<T>);      \
  template void sum(Launch, View<const T>, View<Accumulator<T>>);
TAPELINE_FLOAT(float)
TAPELINE_FLOAT(bf16)
TAPELINE_FLOAT(double)
#undef TAPELINE_FLOAT

#define TAPELINE_PAIR(X, Y)                                   \
  template void axpy(Launch, double, View<const X>, View<Y>); \
  template void cast(Launch, View<const X>, View<Y>);
TAPELINE_PAIR(float, float)
TAPELINE_PAIR(float, bf16)
TAPELINE_PAIR(float, double)
TAPELINE_PAIR(bf16, float)
TAPELINE_PAIR(bf16, bf16)
TAPELINE_PAIR(bf16, double)
TAPELINE_PAIR(double, float)
TAPELINE_PAIR(double, bf16)
TAPELINE_PAIR(double, double)
#undef TAPELINE_PAIR
template void cast(Launch, View<const int32_t>, View<int64_t>);
template void cast(Launch, View<const int64_t>, View<int32_t>);

#define TAPELINE_ANY(T)                               \
  template void copy(Launch, View<const T>, View<T>); \
  template void fill(Launch, double, View<T>);
TAPELINE_ANY(float)
TAPELINE_ANY(bf16)
TAPELINE_ANY(double)
TAPELINE_ANY(int32_t)
TAPELINE_ANY(int64_t)
TAPELINE_ANY(uint8_t)
#undef TAPELINE_ANY

}  // namespace tapeline::cuda
