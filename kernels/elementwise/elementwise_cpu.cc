#include <array>
#include <cmath>
#include <tuple>
#include <utility>

#include "kernels/cuda_dispatch.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/elementwise/elementwise_cuda.h"
#include "kernels/elementwise/nest.h"
#include "kernels/simd_math.h"

namespace tapeline {
namespace {

// Work that outlasts waking a thread.
constexpr int64_t kElementsPerChunk = 16384;

using internal::Nest;
using internal::nest;

// f(element of each view...) for one run of the inner loop.
template <class F, class... T, size_t... I>
void inner_loop(F f, int64_t n, const std::array<int64_t, sizeof...(T)>& step,
                std::index_sequence<I...>, T*... at) {
  if (((step[I] == 1) && ...)) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) f(at[i]...);
  } else {
    for (int64_t i = 0; i < n; ++i) f(at[i * step[I]]...);
  }
}

template <class First, class... Rest>
void check_same(const char* op, const First& first, const Rest&... rest) {
  CHECK(((rest.shape == first.shape) && ...))
      << "[" << op << "] shapes differ: " << describe(first)
      << (("; " + describe(rest)) + ...);
}

// f(element of each view...) at every index. Chunks are whole rows of the nest,
// or pieces of the only row.
template <class F, class... T>
void map(Launch l, F f, View<T>... view) {
  constexpr int kN = sizeof...(T);
  const Shape shape = std::get<0>(std::tie(view...)).shape;
  if (shape.elements() == 0) return;
  const Nest<kN> loop = nest<kN>(shape, {view.strides...});
  std::array<int64_t, kN> step;
  for (int k = 0; k < kN; ++k) step[k] = loop.strides[k][-1];
  const auto run = [&](std::array<int64_t, kN> at, int64_t n) {
    [&]<size_t... I>(std::index_sequence<I...> each) {
      inner_loop<F, T...>(f, n, step, each, (view.data + at[I])...);
    }
    (std::make_index_sequence<kN>());
  };
  if (loop.shape.rank() == 1) {
    l.threads->parallel_for(loop.inner(), kElementsPerChunk,
                            [&](int64_t begin, int64_t end) {
                              std::array<int64_t, kN> at;
                              for (int k = 0; k < kN; ++k)
                                at[k] = begin * step[k];
                              run(at, end - begin);
                            });
    return;
  }
  l.threads->parallel_for(
      loop.rows(), std::max<int64_t>(1, kElementsPerChunk / loop.inner()),
      [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          run(loop.offsets(row), loop.inner());
        }
      });
}

}  // namespace

template <class T>
void add(Launch l, View<const T> a, View<const T> b, View<T> y) {
  if (l.dry) return;
  check_same("add", a, b, y);
  if (kCuda && l.on_cuda()) return cuda::add(l, a, b, y);
  map(
      l, [](const T& a, const T& b, T& y) { store(y, load(a) + load(b)); }, a,
      b, y);
}

template <class T>
void mul(Launch l, View<const T> a, View<const T> b, View<T> y) {
  if (l.dry) return;
  check_same("mul", a, b, y);
  if (kCuda && l.on_cuda()) return cuda::mul(l, a, b, y);
  map(
      l, [](const T& a, const T& b, T& y) { store(y, load(a) * load(b)); }, a,
      b, y);
}

template <class T>
void accumulate(Launch l, View<const T> x, View<T> y) {
  if (l.dry) return;
  check_same("accumulate", x, y);
  if (kCuda && l.on_cuda()) return cuda::accumulate(l, x, y);
  map(
      l, [](const T& x, T& y) { store(y, load(y) + load(x)); }, x, y);
}

template <class X, class Y>
void axpy(Launch l, double alpha, View<const X> x, View<Y> y) {
  if (l.dry) return;
  check_same("axpy", x, y);
  if (kCuda && l.on_cuda()) return cuda::axpy(l, alpha, x, y);
  using A = Accumulator<Y>;
  map(
      l,
      [alpha = static_cast<A>(alpha)](const X& x, Y& y) {
        store(y, std::fma(alpha, static_cast<A>(load(x)), load(y)));
      },
      x, y);
}

template <class T>
void scale(Launch l, double alpha, View<const T> x, View<T> y) {
  if (l.dry) return;
  check_same("scale", x, y);
  if (kCuda && l.on_cuda()) return cuda::scale(l, alpha, x, y);
  map(
      l,
      [alpha = static_cast<Accumulator<T>>(alpha)](const T& x, T& y) {
        store(y, alpha * load(x));
      },
      x, y);
}

template <class A, class B>
void cast(Launch l, View<const A> x, View<B> y) {
  if (l.dry) return;
  check_same("cast", x, y);
  if (kCuda && l.on_cuda()) return cuda::cast(l, x, y);
  if constexpr (std::is_integral_v<A>) {
    map(
        l, [](const A& x, B& y) { y = static_cast<B>(x); }, x, y);
  } else {
    map(
        l,
        [](const A& x, B& y) {
          store(y, static_cast<Accumulator<B>>(load(x)));
        },
        x, y);
  }
}

template <class T>
void copy(Launch l, View<const T> x, View<T> y) {
  if (l.dry) return;
  check_same("copy", x, y);
  if (kCuda && l.on_cuda()) return cuda::copy(l, x, y);
  if constexpr (std::is_same_v<T, bf16>) {
    map(
        l, [](const T& x, T& y) { y.bits = x.bits; }, x, y);
  } else {
    map(
        l, [](const T& x, T& y) { y = x; }, x, y);
  }
}

template <class T>
void fill(Launch l, double value, View<T> y) {
  if (l.dry) return;
  if (kCuda && l.on_cuda()) return cuda::fill(l, value, y);
  if constexpr (std::is_same_v<T, bf16>) {
    const uint16_t bits = bf16(static_cast<float>(value)).bits;
    map(
        l, [bits](T& y) { y.bits = bits; }, y);
  } else {
    const T v = static_cast<T>(value);
    map(
        l, [v](T& y) { y = v; }, y);
  }
}

template <class T>
void sum(Launch l, View<const T> x, View<Accumulator<T>> y) {
  if (l.dry) return;
  using A = Accumulator<T>;
  CHECK_EQ(y.elements(), 1) << "[sum] y is " << describe(y);
  if (kCuda && l.on_cuda()) return cuda::sum(l, x, y);
  std::array<A, kSumChunks> partial{};
  if (x.elements() > 0) {
    const Nest<1> loop = nest<1>(x.shape, {x.strides});
    const int64_t step = loop.strides[0][-1], inner = loop.inner();
    const auto add_up = [&](const T* row, int64_t n) {
      if (step == 1) return tapeline::sum(row, n);
      return lane_sum<A>(n, [&](int64_t i) { return load(row[i * step]); });
    };
    // Whole rows, or pieces of the only row.
    const bool flat = loop.shape.rank() == 1;
    const int64_t n = flat ? inner : loop.rows();
    const int64_t least = flat ? kElementsPerChunk : rows_per_chunk(inner);
    const int64_t grain = std::max(least, ceil_div(n, kSumChunks));
    l.threads->parallel_for(n, grain, [&](int64_t begin, int64_t end) {
      A& total = partial[begin / grain];
      if (flat) {
        total = add_up(x.data + begin * step, end - begin);
        return;
      }
      for (int64_t row = begin; row < end; ++row) {
        total += add_up(x.data + loop.offsets(row)[0], inner);
      }
    });
  }
  A total = 0;
  for (const A p : partial) total += p;
  y.data[0] = total;
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

}  // namespace tapeline
