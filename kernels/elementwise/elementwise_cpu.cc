#include <array>
#include <cmath>
#include <tuple>
#include <utility>

#include "kernels/elementwise/elementwise.h"
#include "kernels/simd_math.h"

namespace tapeline {
namespace {

// Work that outlasts waking a thread.
constexpr int64_t kElementsPerChunk = 16384;

// The same loop nest for N operands, with as few and as long dimensions as
// their strides allow. The last dimension is the inner loop.
template <int N>
struct Nest {
  Shape shape;
  std::array<Shape, N> strides;

  // May dimension d be joined with d + 1? Then one index walks both.
  bool joined(int d) const {
    for (const Shape& s : strides) {
      if (s[d] != s[d + 1] * shape[d + 1]) return false;
    }
    return true;
  }
  int64_t inner() const { return shape[-1]; }
  int64_t rows() const {
    return shape.elements() / std::max<int64_t>(1, inner());
  }

  // Where row `row` begins in each operand.
  std::array<int64_t, N> offsets(int64_t row) const {
    std::array<int64_t, N> at{};
    for (int d = shape.rank() - 2; d >= 0; --d) {
      const int64_t index = row % shape[d];
      row /= shape[d];
      for (int k = 0; k < N; ++k) at[k] += index * strides[k][d];
    }
    return at;
  }
};

template <int N>
Nest<N> nest(const Shape& shape, const std::array<Shape, N>& strides) {
  // Dimensions of one element have no stride to speak of.
  Nest<N> all;
  for (int d = 0; d < shape.rank(); ++d) {
    if (shape[d] == 1) continue;
    all.shape.push_back(shape[d]);
    for (int k = 0; k < N; ++k) all.strides[k].push_back(strides[k][d]);
  }
  Nest<N> out;
  for (int d = 0; d < all.shape.rank(); ++d) {
    if (d > 0 && all.joined(d - 1)) {
      out.shape[-1] *= all.shape[d];
      for (int k = 0; k < N; ++k) out.strides[k][-1] = all.strides[k][d];
    } else {
      out.shape.push_back(all.shape[d]);
      for (int k = 0; k < N; ++k) out.strides[k].push_back(all.strides[k][d]);
    }
  }
  if (out.shape.rank() == 0) {  // a single element
    out.shape.push_back(shape.elements());
    for (int k = 0; k < N; ++k) out.strides[k].push_back(1);
  }
  return out;
}

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

// f(element of each view...) at every index. Chunks are whole rows of the nest,
// or pieces of the only row.
template <class F, class... T>
void map(const char* op, Launch l, F f, View<T>... view) {
  constexpr int kN = sizeof...(T);
  const std::array<Shape, kN> shapes = {view.shape...};
  for (const Shape& shape : shapes) {
    CHECK(shape == shapes[0])
        << "[" << op << "] shapes differ: " << ((describe(view) + "; ") + ...);
  }
  if (shapes[0].elements() == 0) return;
  const Nest<kN> loop = nest<kN>(shapes[0], {view.strides...});
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
  map(
      "add", l,
      [](const T& a, const T& b, T& y) { store(y, load(a) + load(b)); }, a, b,
      y);
}

template <class T>
void mul(Launch l, View<const T> a, View<const T> b, View<T> y) {
  if (l.dry) return;
  map(
      "mul", l,
      [](const T& a, const T& b, T& y) { store(y, load(a) * load(b)); }, a, b,
      y);
}

template <class T>
void accumulate(Launch l, View<const T> x, View<T> y) {
  if (l.dry) return;
  map(
      "accumulate", l, [](const T& x, T& y) { store(y, load(y) + load(x)); }, x,
      y);
}

template <class X, class Y>
void axpy(Launch l, double alpha, View<const X> x, View<Y> y) {
  if (l.dry) return;
  using A = Accumulator<Y>;
  map(
      "axpy", l,
      [alpha = static_cast<A>(alpha)](const X& x, Y& y) {
        store(y, std::fma(alpha, static_cast<A>(load(x)), load(y)));
      },
      x, y);
}

template <class T>
void scale(Launch l, double alpha, View<const T> x, View<T> y) {
  if (l.dry) return;
  map(
      "scale", l,
      [alpha = static_cast<Accumulator<T>>(alpha)](const T& x, T& y) {
        store(y, alpha * load(x));
      },
      x, y);
}

template <class A, class B>
void cast(Launch l, View<const A> x, View<B> y) {
  if (l.dry) return;
  if constexpr (std::is_integral_v<A>) {
    map(
        "cast", l, [](const A& x, B& y) { y = static_cast<B>(x); }, x, y);
  } else {
    map(
        "cast", l,
        [](const A& x, B& y) {
          store(y, static_cast<Accumulator<B>>(load(x)));
        },
        x, y);
  }
}

template <class T>
void copy(Launch l, View<const T> x, View<T> y) {
  if (l.dry) return;
  if constexpr (std::is_same_v<T, bf16>) {
    map(
        "copy", l, [](const T& x, T& y) { y.bits = x.bits; }, x, y);
  } else {
    map(
        "copy", l, [](const T& x, T& y) { y = x; }, x, y);
  }
}

template <class T>
void fill(Launch l, double value, View<T> y) {
  if (l.dry) return;
  if constexpr (std::is_same_v<T, bf16>) {
    const uint16_t bits = bf16(static_cast<float>(value)).bits;
    map(
        "fill", l, [bits](T& y) { y.bits = bits; }, y);
  } else {
    const T v = static_cast<T>(value);
    map(
        "fill", l, [v](T& y) { y = v; }, y);
  }
}

template <class T>
void sum(Launch l, View<const T> x, View<Accumulator<T>> y) {
  if (l.dry) return;
  using A = Accumulator<T>;
  CHECK_EQ(y.elements(), 1) << "[sum] y is " << describe(y);
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
