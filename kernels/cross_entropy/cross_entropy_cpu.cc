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

// loss and lse of token t. Nothing of an ignored token is read.
template <class T, class A>
void forward_row(const T* x, int64_t vocabulary, int32_t label, int64_t t,
                 A& loss, A& lse) {
  loss = lse = 0;
  if (label == kIgnoredLabel) return;
  check_label(label, vocabulary, t);
  lse = log_sum_exp(x, vocabulary);
  loss = lse - load(x[label]);
}

template <class T, class A>
void backward_row(T* x, int64_t vocabulary, int32_t label, int64_t t, A lse,
                  A weight) {
  if (label != kIgnoredLabel) check_label(label, vocabulary, t);
  if (label == kIgnoredLabel || weight == 0) {
    std::fill_n(x, vocabulary, T());
    return;
  }
  const A at_label = weight * (exp_simd(load(x[label]) - lse) - A(1));
#pragma omp simd
  for (int64_t v = 0; v < vocabulary; ++v) {
    store(x[v], weight * exp_simd(load(x[v]) - lse));
  }
  store(x[label], at_label);
}

// f(t) for each token of the logits.
template <class T, class F>
void for_tokens(const Launch& l, const View<T>& logits, F f) {
  const auto rows = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) f(t);
  };
  l.threads->parallel_for(logits.size(0), rows_per_chunk(logits.size(1)), rows);
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
  for_tokens(l, logits, [&](int64_t t) {
    forward_row(&logits(t, 0), logits.size(1), labels(t), t, loss(t), lse(t));
  });
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
  for_tokens(l, logits, [&](int64_t t) {
    backward_row(&logits(t, 0), logits.size(1), labels(t), t, lse(t),
                 weight(t));
  });
}

template <class T>
void cross_entropy_forward_backward(Launch l, View<T> logits,
                                    View<const int32_t> labels,
                                    View<const Accumulator<T>> weight,
                                    View<Accumulator<T>> loss,
                                    View<Accumulator<T>> lse) {
  if (l.dry) return;
  check(logits, labels, loss, lse);
  check(logits, labels, weight, lse);
  if (kCuda && l.on_cuda()) {
    return cuda::cross_entropy_forward_backward(l, logits, labels, weight, loss,
                                                lse);
  }
  // A row's second pass finds it in a cache.
  for_tokens(l, logits, [&](int64_t t) {
    T* x = &logits(t, 0);
    forward_row<T>(x, logits.size(1), labels(t), t, loss(t), lse(t));
    backward_row(x, logits.size(1), labels(t), t, lse(t), weight(t));
  });
}

template <class T>
void cross_entropy_scale(Launch l, View<T> dlogits,
                         View<const Accumulator<T>> factor) {
  if (l.dry) return;
  CHECK(dlogits.rank() == 2 && dense_rows(dlogits) && factor.elements() == 1)
      << "[cross_entropy_scale] needs dense rows and one factor: dlogits are "
      << describe(dlogits) << ", the factor is " << describe(factor);
  if (kCuda && l.on_cuda()) {
    return cuda::cross_entropy_scale(l, dlogits, factor);
  }
  const Accumulator<T> by = *factor.data;
  if (by == 1) return;
  for_tokens(l, dlogits, [&](int64_t t) {
    T* x = &dlogits(t, 0);
#pragma omp simd
    for (int64_t v = 0; v < dlogits.size(1); ++v) {
      store(x[v], by * load(x[v]));
    }
  });
}

#define INSTANTIATE(T)                                                       \
  template void cross_entropy_forward(                                       \
      Launch, View<const T>, View<const int32_t>, View<Accumulator<T>>,      \
      View<Accumulator<T>>);                                                 \
  template void cross_entropy_backward(Launch, View<T>, View<const int32_t>, \
                                       View<const Accumulator<T>>,           \
                                       View<const Accumulator<T>>);          \
  template void cross_entropy_forward_backward(                              \
      Launch, View<T>, View<const int32_t>, View<const Accumulator<T>>,      \
      View<Accumulator<T>>, View<Accumulator<T>>);                           \
  template void cross_entropy_scale(Launch, View<T>, View<const Accumulator<T>>)
INSTANTIATE(float);
INSTANTIATE(bf16);
INSTANTIATE(double);
#undef INSTANTIATE

}  // namespace tapeline
