#include "tools/parity/margins.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace tapeline {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double finite_or_infinity(double gap) {
  return std::isfinite(gap) ? gap : kInfinity;
}

std::vector<double> descending(std::vector<double> v) {
  std::sort(v.begin(), v.end(), std::greater<double>());
  return v;
}

std::vector<double> scores(const double* logits, size_t experts, bool sigmoid) {
  std::vector<double> s(logits, logits + experts);
  if (sigmoid) {
    for (double& x : s) x = 1 / (1 + std::exp(-x));
    return s;
  }
  const double most = *std::max_element(s.begin(), s.end());
  double sum = 0;
  for (double& x : s) sum += x = std::exp(x - most);
  for (double& x : s) x /= sum;
  return s;
}

}  // namespace

Values index_margin(const Values& scores_TS, int64_t top_k) {
  const auto rows = static_cast<size_t>(scores_TS.shape[0]);
  const auto keys = static_cast<size_t>(scores_TS.shape[1]);
  const size_t k = std::min(static_cast<size_t>(top_k), keys);
  Values out{ValueKind::kActivation, {scores_TS.shape[0]}, {}};
  for (size_t t = 0; t < rows; ++t) {
    const auto row =
        scores_TS.v.begin() + static_cast<std::ptrdiff_t>(t * keys);
    const std::vector<double> sorted =
        descending({row, row + static_cast<std::ptrdiff_t>(keys)});
    out.v.push_back(
        finite_or_infinity(sorted[k - 1] - sorted[std::min(k + 1, keys) - 1]));
  }
  return out;
}

Values router_margin(const Values& logits_TE, const std::vector<double>& bias,
                     const RouterRule& rule) {
  const auto rows = static_cast<size_t>(logits_TE.shape[0]);
  const auto experts = static_cast<size_t>(logits_TE.shape[1]);
  const auto k = static_cast<size_t>(rule.top_k);
  Values out{ValueKind::kActivation, {logits_TE.shape[0]}, {}};
  for (size_t t = 0; t < rows; ++t) {
    std::vector<double> choice =
        scores(logits_TE.v.data() + t * experts, experts, rule.sigmoid);
    for (size_t e = 0; e < bias.size(); ++e) choice[e] += bias[e];
    double group_gap = kInfinity;
    if (rule.groups > rule.top_groups) {
      const size_t size = experts / static_cast<size_t>(rule.groups);
      std::vector<double> group;
      for (size_t g = 0; g < experts; g += size) {
        const std::vector<double> sorted = descending(
            {choice.begin() + static_cast<std::ptrdiff_t>(g),
             choice.begin() + static_cast<std::ptrdiff_t>(g + size)});
        group.push_back(sorted[0] + (size > 1 ? sorted[1] : 0));
      }
      const std::vector<double> best = descending(group);
      const auto kept = static_cast<size_t>(rule.top_groups);
      group_gap = best[kept - 1] - best[kept];
      for (size_t e = 0; e < experts; ++e) {
        if (group[e / size] < best[kept - 1]) choice[e] = -kInfinity;
      }
    }
    const std::vector<double> sorted = descending(choice);
    const double gap =
        experts > k ? finite_or_infinity(sorted[k - 1] - sorted[k]) : kInfinity;
    out.v.push_back(std::min(gap, group_gap));
  }
  return out;
}

}  // namespace tapeline
