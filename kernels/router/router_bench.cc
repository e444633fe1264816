#include <cmath>
#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/router/router.h"

namespace tapeline::bench {
namespace {

struct Data {
  explicit Data(const std::vector<int64_t>& dims)
      : tokens(dims[0]),
        experts(dims[1]),
        options{.top_k = static_cast<int>(dims[2]),
                .groups = static_cast<int>(dims[3]),
                .top_groups = static_cast<int>(ceil_div(dims[3], 2)),
                .scale = 2.5},
        logits(normal<float>(tokens * experts, 1)),
        bias(normal<float>(experts, 2)),
        weight(tokens * options.top_k),
        dweight(normal<float>(tokens * options.top_k, 3)),
        dlogits(logits.size()),
        ids(tokens * options.top_k) {
    for (float& b : bias) b *= 0.1f;
  }
  void choose(Launch l) {
    const Data& in = *this;
    router_choose(l, view_of(in.logits, {tokens, experts}),
                  view_of(in.bias, {experts}), options,
                  view_of(ids, {tokens, options.top_k}));
    router_weights(l, view_of(in.logits, {tokens, experts}),
                   view_of(in.ids, {tokens, options.top_k}), options,
                   view_of(weight, {tokens, options.top_k}));
  }
  void backward(Launch l) {
    const Data& in = *this;
    router_weights_backward(l, view_of(in.dweight, {tokens, options.top_k}),
                            view_of(in.logits, {tokens, experts}),
                            view_of(in.ids, {tokens, options.top_k}), options,
                            view_of(dlogits, {tokens, experts}));
  }
  double score(int64_t t, int64_t k) const {
    const double l = logits[t * experts + ids[t * options.top_k + k]];
    return 1 / (1 + std::exp(-l));
  }
  Cost cost(double rows) const {
    return {.bytes =
                4.0 * static_cast<double>(tokens) *
                (rows * static_cast<double>(experts) + 2.0 * options.top_k)};
  }

  int64_t tokens, experts;
  RouterOptions options;
  std::vector<float> logits, bias, weight, dweight, dlogits;
  std::vector<int32_t> ids;
};

// Choice and weights.
Run forward(const Arguments& a) {
  CHECK(a.dtype == DType::kF32) << "[router] logits are f32 here";
  auto data = std::make_shared<Data>(a.dims);
  return {.launch = [data, l = a.launch] { data->choose(l); },
          .cost = data->cost(1),
          .verify =
              [data](Verifier& verifier) {
                const int top_k = data->options.top_k;
                for (int64_t t : sampled_rows(data->tokens)) {
                  double sum = 0;
                  for (int k = 0; k < top_k; ++k) sum += data->score(t, k);
                  std::vector<double> expected;
                  for (int k = 0; k < top_k; ++k) {
                    expected.push_back(2.5 * data->score(t, k) / sum);
                  }
                  verifier.row(
                      View<const float>(&data->weight[t * top_k], Shape{top_k}),
                      expected, data->experts);
                }
              }};
}

Run backward(const Arguments& a) {
  CHECK(a.dtype == DType::kF32) << "[router] logits are f32 here";
  auto data = std::make_shared<Data>(a.dims);
  data->choose(a.launch);
  return {.launch = [data, l = a.launch] { data->backward(l); },
          .cost = data->cost(2),
          .verify =
              [data](Verifier& verifier) {
                const int top_k = data->options.top_k;
                for (int64_t t : sampled_rows(data->tokens)) {
                  double sum = 0, product = 0;
                  for (int k = 0; k < top_k; ++k) {
                    const double s = data->score(t, k);
                    sum += s;
                    product += s * data->dweight[t * top_k + k];
                  }
                  std::vector<double> expected(data->experts);
                  for (int k = 0; k < top_k; ++k) {
                    const double s = data->score(t, k);
                    const double g = data->dweight[t * top_k + k];
                    expected[data->ids[t * top_k + k]] =
                        2.5 * s * (1 - s) * (g - product / sum) / sum;
                  }
                  verifier.row(
                      View<const float>(&data->dlogits[t * data->experts],
                                        Shape{data->experts}),
                      expected, data->experts);
                }
              }};
}

const std::vector<std::vector<int64_t>> kShapes = {
    {1024, 8, 2, 1}, {1024, 256, 8, 1}, {1024, 256, 8, 8}};
const std::vector<std::string> kKeys = {"T", "E", "k", "groups"};
const bool added = add({"router", "router_topk", kKeys, kShapes, forward}) &&
                   add({"router", "router_bwd", kKeys, kShapes, backward});

}  // namespace
}  // namespace tapeline::bench
