#include <cmath>
#include <memory>
#include <utility>

#include "kernels/aux_loss/aux_loss.h"
#include "kernels/bench/bench.h"
#include "kernels/router/router.h"

namespace tapeline::bench {
namespace {

struct Data {
  explicit Data(const std::vector<int64_t>& dims)
      : tokens(dims[0]),
        experts(dims[1]),
        logits(normal<float>(tokens * experts, 1)),
        dlogits(logits.size()),
        counts(experts),
        loss(1),
        partial(kLossPartials) {
    for (int64_t e = 0; e < experts; ++e) {
      counts[e] = static_cast<int32_t>(1 + e % 5);
      total += counts[e];
    }
    device_counts = Array<int32_t>(counts);
  }
  void forward(Launch l) {
    const Data& in = *this;
    balance_loss_forward(l, BalanceKind::kSigmoid,
                         view_of(in.logits, {tokens, experts}), {},
                         view_of(in.device_counts, {experts}), {},
                         view_of(loss, {1}), view_of(partial, {kLossPartials}));
  }
  void backward(Launch l) {
    const Data& in = *this;
    balance_loss_backward(l, 1, BalanceKind::kSigmoid,
                          view_of(in.logits, {tokens, experts}), {},
                          view_of(in.device_counts, {experts}), {},
                          view_of(dlogits, {tokens, experts}));
  }
  double score(int64_t t, int64_t e) const {
    return 1 / (1 + std::exp(-double(logits[t * experts + e])));
  }
  double fraction(int64_t e) const {
    return static_cast<double>(experts) * counts[e] / total;
  }
  // sum_e s, and sum_e f s divided by it.
  std::pair<double, double> sums(int64_t t) const {
    double sum = 0, weighted = 0;
    for (int64_t e = 0; e < experts; ++e) {
      sum += score(t, e);
      weighted += fraction(e) * score(t, e);
    }
    return {sum, weighted / sum};
  }

  int64_t tokens, experts;
  Array<float> logits, dlogits;
  std::vector<int32_t> counts;
  Array<int32_t> device_counts;
  Array<float> loss;
  Array<double> partial;
  double total = 0;
};

Run forward(const Arguments& a) {
  auto data = std::make_shared<Data>(a.dims);
  const double elements = static_cast<double>(data->logits.size());
  return {.launch = [data, l = a.launch] { data->forward(l); },
          .cost = {.bytes = 4 * elements},
          .verify =
              [data](Verifier& verifier) {
                double total = 0;
                for (int64_t t = 0; t < data->tokens; ++t) {
                  total += data->sums(t).second;
                }
                verifier.row(data->loss.row(0, 1),
                             {total / static_cast<double>(data->tokens)},
                             data->experts);
              }};
}

Run backward(const Arguments& a) {
  auto data = std::make_shared<Data>(a.dims);
  const double elements = static_cast<double>(data->logits.size());
  return {.launch = [data, l = a.launch] { data->backward(l); },
          .cost = {.bytes = 8 * elements},
          .verify =
              [data](Verifier& verifier) {
                const int64_t n = data->experts;
                for (int64_t t : sampled_rows(data->tokens)) {
                  const auto [sum, weighted] = data->sums(t);
                  std::vector<double> expected;
                  for (int64_t e = 0; e < n; ++e) {
                    const double s = data->score(t, e);
                    expected.push_back(s * (1 - s) / sum *
                                       (data->fraction(e) - weighted) /
                                       static_cast<double>(data->tokens));
                  }
                  verifier.row(data->dlogits.row(t * n, n), expected, n);
                }
              }};
}

const std::vector<std::vector<int64_t>> kShapes = {{1024, 8}, {4096, 256}};
const std::vector<std::vector<int64_t>> kModels = {{16384, 256}};
const std::vector<std::string> kKeys = {"T", "E"};
const Limits kLimits = {.dtypes = {DType::kF32},
                        .broken = [](const std::vector<int64_t>& d) {
                          return at_most(kMaxExperts, "E", d[1]);
                        }};

const bool added = add({"aux_loss", "balance_fwd", kKeys, kShapes, forward,
                        kModels, DType::kF32},
                       kLimits) &&
                   add({"aux_loss", "balance_bwd", kKeys, kShapes, backward,
                        kModels, DType::kF32},
                       kLimits);

}  // namespace
}  // namespace tapeline::bench
