#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "kernels/cuda_dispatch.h"
#include "kernels/grad_norm/grad_norm.h"
#include "kernels/grad_norm/grad_norm_cuda.h"
#include "kernels/simd_math.h"

namespace tapeline {
namespace {

// One partial per chunk lives on the stack; longer inputs get longer chunks
// instead of more.
constexpr int64_t kMaxChunks = 256;
constexpr int64_t kMinChunk = 16384;

int64_t chunk_length(int64_t n) {
  return std::max(kMinChunk, ceil_div(n, kMaxChunks));
}

template <class A>
void check(const View<const A>& x) {
  CHECK(x.contiguous()) << "[grad_norm] needs a contiguous array: x is "
                        << describe(x);
}

}  // namespace

template <class A>
double squared_norm(Launch l, View<const A> x) {
  if (l.dry) return 0;
  check(x);
  if (kCuda && l.on_cuda()) return cuda::squared_norm(l, x);
  std::array<double, kMaxChunks> partial{};
  const int64_t n = x.elements(), grain = chunk_length(n);
  l.threads->parallel_for(n, grain, [&](int64_t begin, int64_t end) {
    const A* from = x.data + begin;
    partial[begin / grain] = lane_reduce(
        end - begin, 0.0,
        [from](double lane, int64_t i) {
          const double v = from[i];
          return std::fma(v, v, lane);
        },
        [](double a, double b) { return a + b; });
  });
  double sum = 0;
  for (double p : partial) sum += p;
  return sum;
}

template <class A>
bool all_finite(Launch l, View<const A> x) {
  if (l.dry) return true;
  check(x);
  if (kCuda && l.on_cuda()) return cuda::all_finite(l, x);
  std::array<bool, kMaxChunks> bad{};
  const int64_t n = x.elements(), grain = chunk_length(n);
  l.threads->parallel_for(n, grain, [&](int64_t begin, int64_t end) {
    const A* from = x.data + begin;
    // x - x is 0 for a finite x and NaN otherwise, and a sum keeps NaN.
    const A sum = lane_sum<A>(end - begin,
                              [from](int64_t i) { return from[i] - from[i]; });
    bad[begin / grain] = sum != 0;
  });
  return std::none_of(bad.begin(), bad.end(), [](bool b) { return b; });
}

template <class A>
void squared_norms(Launch l, const std::vector<View<const A>>& x,
                   View<double> partial, View<double> each) {
  if (l.dry) return;
  const auto count = static_cast<int64_t>(x.size());
  for (const View<const A>& one : x) check(one);
  CHECK(partial.contiguous() && partial.elements() >= count * kNormPartials &&
        each.contiguous() && each.elements() == count)
      << "[grad_norm] " << count << " tensors: partial is " << describe(partial)
      << ", each is " << describe(each);
  if (kCuda && l.on_cuda()) return cuda::squared_norms(l, x, partial, each);
  for (int64_t i = 0; i < count; ++i) {
    each.data[i] = squared_norm(l, x[static_cast<size_t>(i)]);
  }
}

void add_in_order(Launch l, View<const double> each, View<double> total) {
  if (l.dry) return;
  CHECK(each.contiguous() && total.elements() == 1)
      << "[grad_norm] each is " << describe(each) << ", total is "
      << describe(total);
  if (kCuda && l.on_cuda()) return cuda::add_in_order(l, each, total);
  for (int64_t i = 0; i < each.elements(); ++i) *total.data += each.data[i];
}

void clip_factor(Launch l, View<const double> squares, double max_norm,
                 View<double> factor) {
  if (l.dry) return;
  CHECK(squares.elements() == 1 && factor.elements() == 1)
      << "[grad_norm] squares is " << describe(squares) << ", factor is "
      << describe(factor);
  if (kCuda && l.on_cuda()) {
    return cuda::clip_factor(l, squares, max_norm, factor);
  }
  const double norm = std::sqrt(*squares.data);
  if (!std::isfinite(norm)) {
    *factor.data = std::numeric_limits<double>::quiet_NaN();
  } else {
    *factor.data =
        max_norm > 0 ? std::min(1.0, max_norm / (norm + kClipEps)) : 1.0;
  }
}

template double squared_norm(Launch, View<const float>);
template double squared_norm(Launch, View<const double>);
template bool all_finite(Launch, View<const float>);
template bool all_finite(Launch, View<const double>);
template void squared_norms(Launch, const std::vector<View<const float>>&,
                            View<double>, View<double>);
template void squared_norms(Launch, const std::vector<View<const double>>&,
                            View<double>, View<double>);

}  // namespace tapeline
