#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "kernels/bench/bench.h"
#include "kernels/router/router.h"

namespace tapeline::bench {
namespace {

// Sigmoid with a bias in so many groups; softmax without one for 0.
struct Data {
  explicit Data(const std::vector<int64_t>& dims)
      : tokens(dims[0]),
        experts(dims[1]),
        options{.top_k = static_cast<int>(dims[2]),
                .groups = static_cast<int>(std::max<int64_t>(1, dims[3])),
                .top_groups = static_cast<int>(
                    std::max<int64_t>(1, ceil_div(dims[3], 2))),
                .scale = dims[3] == 0 ? 1 : 2.5},
        logits(normal<float>(tokens * experts, 1)),
        weight(tokens * options.top_k),
        dweight(normal<float>(tokens * options.top_k, 3)),
        dlogits(logits.size()),
        ids(tokens * options.top_k) {
    if (dims[3] == 0) {
      options.score = RouterOptions::kSoftmax;
      return;
    }
    const Array<float> z = normal<float>(experts, 2);
    std::vector<float> small;
    for (int64_t e = 0; e < experts; ++e) small.push_back(0.1f * z[e]);
    bias = Array<float>(small);
  }
  void choose(Launch l) {
    const Data& in = *this;
    router_choose(
        l, view_of(in.logits, {tokens, experts}),
        in.bias.size() > 0 ? view_of(in.bias, {experts}) : View<const float>(),
        options, view_of(ids, {tokens, options.top_k}));
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
  // Of a chosen expert: its sigmoid, or (groups 0) its softmax.
  double score(int64_t t, int64_t k) const {
    const float* row = logits.host(t * experts, experts);
    const double l = row[ids[t * options.top_k + k]];
    if (options.score == RouterOptions::kSigmoid) return 1 / (1 + std::exp(-l));
    double sum = 0;
    for (int64_t e = 0; e < experts; ++e) sum += std::exp(double(row[e]));
    return std::exp(l) / sum;
  }
  // What the contract chooses for a token.
  std::vector<double> choice(int64_t t) const {
    const float* row = logits.host(t * experts, experts);
    std::vector<double> value(experts);
    for (int64_t e = 0; e < experts; ++e) {
      const double l = row[e];
      value[e] = options.score == RouterOptions::kSoftmax
                     ? l
                     : 1 / (1 + std::exp(-l)) + double(bias[e]);
    }
    const auto best = [&](const std::vector<double>& of, int64_t count) {
      std::vector<int64_t> order(of.size());
      for (size_t i = 0; i < order.size(); ++i) {
        order[i] = static_cast<int64_t>(i);
      }
      std::stable_sort(order.begin(), order.end(),
                       [&](int64_t a, int64_t b) { return of[a] > of[b]; });
      order.resize(count);
      return order;
    };
    if (options.groups > 1) {
      const int64_t size = experts / options.groups;
      std::vector<double> group(options.groups);
      for (int64_t g = 0; g < options.groups; ++g) {
        std::vector<double> of(&value[g * size], &value[g * size] + size);
        std::sort(of.rbegin(), of.rend());
        group[g] = of[0] + (size > 1 ? of[1] : 0);
      }
      std::vector<bool> kept(options.groups);
      for (int64_t g : best(group, options.top_groups)) kept[g] = true;
      for (int64_t e = 0; e < experts; ++e) {
        if (!kept[e / size]) value[e] = -INFINITY;
      }
    }
    const std::vector<int64_t> ids = best(value, options.top_k);
    return {ids.begin(), ids.end()};
  }
  Cost cost(double rows) const {
    return {.bytes =
                4.0 * static_cast<double>(tokens) *
                (rows * static_cast<double>(experts) + 2.0 * options.top_k)};
  }

  int64_t tokens, experts;
  RouterOptions options;
  Array<float> logits, bias, weight, dweight, dlogits;
  Array<int32_t> ids;
};

// Choice and weights.
Run forward(const Arguments& a) {
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
                  std::vector<float> ids;
                  for (int k = 0; k < top_k; ++k) {
                    expected.push_back(data->options.scale * data->score(t, k) /
                                       sum);
                    ids.push_back(static_cast<float>(data->ids[t * top_k + k]));
                  }
                  verifier.row(View<const float>(ids.data(), Shape{top_k}),
                               data->choice(t));
                  verifier.row(data->weight.row(t * top_k, top_k), expected,
                               data->experts);
                }
              }};
}

Run backward(const Arguments& a) {
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
                  const double scale = data->options.scale;
                  double ds_s = 0;  // sum_j ds_j s_j
                  for (int k = 0; k < top_k; ++k) {
                    const double s = data->score(t, k);
                    const double g = data->dweight[t * top_k + k];
                    const double ds = scale * (g - product / sum) / sum;
                    ds_s += ds * s;
                    expected[data->ids[t * top_k + k]] =
                        data->options.score == RouterOptions::kSigmoid
                            ? s * (1 - s) * ds
                            : s * ds;
                  }
                  if (data->options.score == RouterOptions::kSoftmax) {
                    const float* row =
                        data->logits.host(t * data->experts, data->experts);
                    double z = 0;
                    for (int64_t e = 0; e < data->experts; ++e) {
                      z += std::exp(double(row[e]));
                    }
                    for (int64_t e = 0; e < data->experts; ++e) {
                      expected[e] -= std::exp(double(row[e])) / z * ds_s;
                    }
                  }
                  verifier.row(
                      data->dlogits.row(t * data->experts, data->experts),
                      expected, data->experts);
                }
              }};
}

const std::vector<std::vector<int64_t>> kShapes = {
    {1024, 8, 2, 1}, {1024, 256, 8, 1}, {1024, 256, 8, 8}, {1024, 128, 8, 0}};
const std::vector<std::string> kKeys = {"T", "E", "k", "groups"};
// DeepSeek-V3, GLM-5.2 and Qwen3-MoE.
const std::vector<std::vector<int64_t>> kModels = {
    {16384, 256, 8, 8}, {16384, 256, 8, 1}, {16384, 128, 8, 0}};
const Limits kLimits = {
    .dtypes = {DType::kF32}, .broken = [](const std::vector<int64_t>& d) {
      return first_broken({d[2] <= d[1] ? "" : "k is at most E",
                           multiple("groups", d[3], "E", d[1]),
                           at_most(kMaxChoices, "k", d[2]),
                           at_most(kMaxExperts, "E", d[1]),
                           // Half of them are chosen.
                           at_most(2 * kMaxChoices, "groups", d[3])});
    }};

const bool added = add({"router", "router_topk", kKeys, kShapes, forward,
                        kModels, DType::kF32, "groups"},
                       kLimits) &&
                   add({"router", "router_bwd", kKeys, kShapes, backward,
                        kModels, DType::kF32, "groups"},
                       kLimits);

}  // namespace
}  // namespace tapeline::bench
