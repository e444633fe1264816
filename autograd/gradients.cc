#include "autograd/gradients.h"

#include <algorithm>

#include "kernels/elementwise/elementwise.h"
#include "runtime/access.h"

namespace tapeline {

const Tensor& ParameterGradients::accumulator(const Parameter& parameter,
                                              int site) {
  Sums& sums = sums_[parameter.key()];
  if (!sums.parameter.defined()) sums.parameter = parameter;
  std::vector<Site>& sites = sums.sites;
  auto at = std::lower_bound(
      sites.begin(), sites.end(), site,
      [](const Site& entry, int wanted) { return entry.site < wanted; });
  if (at == sites.end() || at->site != site) {
    const Tensor& value = parameter.value();
    at = sites.insert(at, {site, Tensor::zeros(value.shape(),
                                               accumulator_dtype(value.dtype()),
                                               Tag::kGradient)});
  }
  at->used = true;
  return at->sum;
}

Tensor ParameterGradients::combined(const Parameter& parameter) {
  auto found = sums_.find(parameter.key());
  if (found == sums_.end()) return {};
  Site* first = nullptr;
  for (Site& site : found->second.sites) {
    if (!site.used) continue;
    if (first == nullptr) {
      first = &site;
      continue;
    }
    dispatch_float(site.sum.dtype(), [&]<class T>() {
      accumulate(launch(), read<T>(site.sum).view(),
                 write<T>(first->sum).view());
    });
    site.sum.set_zero();
    site.used = false;
  }
  return first == nullptr ? Tensor() : first->sum;
}

bool ParameterGradients::reached(const Parameter& parameter) const {
  auto found = sums_.find(parameter.key());
  return found != sums_.end() &&
         std::any_of(found->second.sites.begin(), found->second.sites.end(),
                     [](const Site& site) { return site.used; });
}

void ParameterGradients::zero() {
  for (auto& [key, sums] : sums_) {
    for (Site& site : sums.sites) {
      if (site.used) site.sum.set_zero();
      site.used = false;
    }
  }
}

}  // namespace tapeline
