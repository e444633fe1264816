#include <cmath>
#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/cross_entropy/cross_entropy.h"

namespace tapeline::bench {
namespace {

template <class T>
struct Data {
  using A = Accumulator<T>;
  explicit Data(const std::vector<int64_t>& dims)
      : tokens(dims[0]),
        vocabulary(dims[1]),
        start(normal<T>(tokens * vocabulary, 1)),
        logits(start),
        loss(tokens),
        lse(tokens),
        weight(normal<A>(tokens, 2)) {
    for (int64_t t = 0; t < tokens; ++t) {
      labels.push_back(static_cast<int32_t>(t * 7919 % vocabulary));
    }
    device_labels = Array<int32_t>(labels);
  }
  void forward(Launch l) {
    cross_entropy_forward<T>(l, view_of(logits, {tokens, vocabulary}),
                             label_view(), view_of(loss, {tokens}),
                             view_of(lse, {tokens}));
  }
  void backward(Launch l) {
    cross_entropy_backward<T>(l, view_of(logits, {tokens, vocabulary}),
                              label_view(), view_of(lse, {tokens}),
                              view_of(weight, {tokens}));
  }
  void both(Launch l) {
    cross_entropy_forward_backward<T>(l, view_of(logits, {tokens, vocabulary}),
                                      label_view(), view_of(weight, {tokens}),
                                      view_of(loss, {tokens}),
                                      view_of(lse, {tokens}));
  }
  View<const int32_t> label_view() const {
    return view_of(device_labels, {tokens});
  }
  double expected_lse(int64_t t) const {
    double sum = 0;
    for (int64_t v = 0; v < vocabulary; ++v) {
      sum += std::exp(double(start[t * vocabulary + v]));
    }
    return std::log(sum);
  }

  int64_t tokens, vocabulary;
  Array<T> start, logits;
  Array<A> loss, lse, weight;
  std::vector<int32_t> labels;
  Array<int32_t> device_labels;
};

template <class T>
Run make_forward(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a.dims);
  return {.launch = [data, l = a.launch] { data->forward(l); },
          .cost = cross_entropy_cost(a.dims[0], a.dims[1], sizeof(T), false),
          .verify =
              [data](Verifier& verifier) {
                for (int64_t t : sampled_rows(data->tokens)) {
                  verifier.row(data->lse.row(t, 1), {data->expected_lse(t)},
                               data->vocabulary);
                }
              }};
}

// With kBoth forward and backward in one; the bytes are those of one read of
// the logits and one write of their gradient.
template <class T, bool kBoth>
Run make_backward(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a.dims);
  data->forward(a.launch);
  const auto launch = [data, l = a.launch] {
    if (kBoth) {
      data->both(l);
    } else {
      data->backward(l);
    }
  };
  return {
      // In place: later launches work on gradients, at the same speed.
      .launch = launch,
      .cost = cross_entropy_cost(a.dims[0], a.dims[1], sizeof(T), true),
      .verify = [data, launch, l = a.launch](Verifier& verifier) {
        data->logits = data->start;
        if (!kBoth) data->forward(l);
        launch();
        const int64_t n = data->vocabulary;
        // As one row: the label's element outweighs all others of a token,
        // so a token alone would be judged by a single rounding.
        std::vector<T> got;
        std::vector<double> expected;
        for (int64_t t : sampled_rows(data->tokens)) {
          const double lse = data->expected_lse(t);
          for (int64_t v = 0; v < n; ++v) {
            const double p = std::exp(double(data->start[t * n + v]) - lse);
            expected.push_back(data->weight[t] * (p - (v == data->labels[t])));
            got.push_back(data->logits[t * n + v]);
          }
        }
        verifier.row(
            View<const T>(got.data(), {static_cast<int64_t>(got.size())}),
            expected, n);
      }};
}

Run forward(const Arguments& a) {
  return dispatch_float(a.dtype, [&]<class T>() { return make_forward<T>(a); });
}
template <bool kBoth>
Run backward(const Arguments& a) {
  return dispatch_float(a.dtype,
                        [&]<class T>() { return make_backward<T, kBoth>(a); });
}

const std::vector<std::vector<int64_t>> kShapes = {
    {1024, 256}, {256, 32768}, {64, 154880}};
const std::vector<std::vector<int64_t>> kModels = {{8192, 151936},
                                                   {4096, 154880}};
const std::vector<std::string> kKeys = {"T", "V"};
const bool added =
    add({"cross_entropy", "ce_fwd", kKeys, kShapes, forward, kModels}) &&
    add({"cross_entropy", "ce_bwd", kKeys, kShapes, backward<false>,
         kModels}) &&
    add({"cross_entropy", "cross_entropy_fwdbwd", kKeys, kShapes,
         backward<true>, kModels});

}  // namespace
}  // namespace tapeline::bench
