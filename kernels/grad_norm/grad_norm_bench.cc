#include <algorithm>
#include <cmath>
#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/grad_norm/grad_norm.h"

namespace tapeline::bench {
namespace {

// The norm of gradients in several tensors and the factor that clips them: what
// an optimizer reads beside the gradients, so nothing is written but these two.
struct Data {
  explicit Data(const std::vector<int64_t>& dims)
      : tensors(dims[0]),
        n(dims[1]),
        x(normal<float>(n, 1)),
        partial(tensors * kNormPartials),
        each(tensors),
        total(1),
        factor(1) {}
  void launch(Launch l) {
    const Data& in = *this;
    fill(l, 0.0, view_of(total, {1}));
    const View<const float> rows = view_of(in.x, {tensors, n / tensors});
    std::vector<View<const float>> gradients;
    for (int64_t t = 0; t < tensors; ++t) gradients.push_back(rows[t]);
    squared_norms(l, gradients, view_of(partial, {partial.size()}),
                  view_of(each, {tensors}));
    add_in_order(l, view_of(in.each, {tensors}), view_of(total, {1}));
    clip_factor(l, view_of(in.total, {1}), 1.0, view_of(factor, {1}));
  }

  int64_t tensors, n;
  Array<float> x;
  Array<double> partial, each, total, factor;
};

Run make(const Arguments& a) {
  auto data = std::make_shared<Data>(a.dims);
  return {.launch = [data, l = a.launch] { data->launch(l); },
          .cost = squared_norm_cost(data->n),
          .verify =
              [data](Verifier& verifier) {
                double sum = 0;
                constexpr int64_t kBlock = 1 << 20;
                for (int64_t at = 0; at < data->n; at += kBlock) {
                  const int64_t count = std::min(kBlock, data->n - at);
                  const float* x = data->x.host(at, count);
                  double part = 0;
                  for (int64_t i = 0; i < count; ++i) {
                    part += double(x[i]) * double(x[i]);
                  }
                  sum += part;
                }
                verifier.row(data->total.row(0, 1), {sum}, data->n);
                verifier.row(data->factor.row(0, 1),
                             {std::min(1.0, 1 / (std::sqrt(sum) + kClipEps))},
                             data->n);
              }};
}

const bool added =
    add({"grad_norm",
         "clip_grad_norm",
         {"tensors", "params"},
         {{1, 100000}, {4, 16777216}},
         make,
         {{48, 603979776}},
         DType::kF32},
        {.dtypes = {DType::kF32}, .broken = [](const std::vector<int64_t>& d) {
           return multiple("tensors", d[0], "params", d[1]);
         }});

}  // namespace
}  // namespace tapeline::bench
