#include <algorithm>
#include <cmath>

#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/cross_entropy/cross_entropy_cuda.h"
#include "kernels/cuda_dispatch.h"
#include "kernels/simd_math.h"

namespace tapeline {
namespace {

template <class T, class A, class B>
void check(const View<T>& logits, const View<const int32_t>& labels,
           const View<A>& a, const View<B>& b) {
  CHECK(logits.rank() == 2 && dense_rows(logits) && logits.size(1) >= 1)
      << "[cross_entropy] needs dense rows: logits are " << describe(logits);
  const Shape per_token{logits.size(0)};
  CHECK(labels.shape == per_token && a.shape == per_token &&
        b.shape == per_token)
      << "[cross_entropy] shapes: logits are " << describe(logits)
      << ", labels are " << describe(labels) << ", values per token are "
      << describe(a) << " and " << describe(b);
}

void check_label(int32_t label, int64_t vocabulary, int64_t t) {
  CHECK(label >= 0 && label < vocabulary)
      << "[cross_entropy] label " << label << " of token " << t
      << " is neither below " << vocabulary << " nor " << kIgnoredLabel;
}

// ln sum exp, stable for any finite logits. An infinite maximum is the answer
// itself: x - max would be inf - inf.
template <class T>
Accumulator<T> log_sum_exp(const T* x, int64_t n) {
  using A = Accumulator<T>;
  const A max = max_of(x, n);
  if (std::isinf(max)) return max;
  const A sum = lane_sum<A>(
      n, [x, max](int64_t i) { return exp_simd(load(x[i]) - max); });
  return max + std::log(sum);
}

}  // namespace

template <class T>
void cross_entropy_forward(Launch l, View<const T> logits,
                           View<const int32_t> labels,
                           View<Accumulator<T>> loss,
                           View<Accumulator<T>> lse) {
  if (l.dry) return;
  check(logits, labels, loss, lse);
  if (kCuda && l.on_cuda()) {
    return cuda::cross_entropy_forward(l, logits, labels, loss, lse);
  }
  const int64_t vocabulary = logits.size(1);
  const auto rows = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      loss(t) = lse(t) = 0;
      if (labels(t) == kIgnoredLabel) continue;
      check_label(labels(t), vocabulary, t);
      const T* x = &logits(t, 0);
      lse(t) = log_sum_exp(x, vocabulary);
      loss(t) = lse(t) - load(x[labels(t)]);
    }
  };
  l.threads->parallel_for(logits.size(0), rows_per_chunk(vocabulary), rows);
}

template <class T>
void cross_entropy_backward(Launch l, View<T> logits,
                            View<const int32_t> labels,
                            View<const Accumulator<T>> lse,
                            View<const Accumulator<T>> weight) {
  if (l.dry) return;
  check(logits, labels, lse, weight);
  if (kCuda && l.on_cuda()) {
    return cuda::cross_entropy_backward(l, logits, labels, lse, weight);
  }
  using A = Accumulator<T>;
  const int64_t vocabulary = logits.size(1);
  const auto rows = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      T* x = &logits(t, 0);
      const int32_t label = labels(t);
      if (label != kIgnoredLabel) check_label(label, vocabulary, t);
      if (label == kIgnoredLabel || weight(t) == 0) {
        std::fill_n(x, vocabulary, T());
        continue;
      }
      const A w = weight(t), z = lse(t);
      const A at_label = w * (exp_simd(load(x[label]) - z) - A(1));
#pragma omp simd
      for (int64_t v = 0; v < vocabulary; ++v) {
        store(x[v], w * exp_simd(load(x[v]) - z));
      }
      store(x[label], at_label);
    }
  };
  l.threads->parallel_for(logits.size(0), rows_per_chunk(vocabulary), rows);
}

#define INSTANTIATE(T)                                                       \
  template void cross_entropy_forward(                                       \
      Launch, View<const T>, View<const int32_t>, View<Accumulator<T>>,      \
      View<Accumulator<T>>);                                                 \
  template void cross_entropy_backward(Launch, View<T>, View<const int32_t>, \
                                       View<const Accumulator<T>>,           \
                                       View<const Accumulator<T>>)
INSTANTIATE(float);
INSTANTIATE(bf16);
INSTANTIATE(double);
#undef INSTANTIATE

}  // namespace tapeline
