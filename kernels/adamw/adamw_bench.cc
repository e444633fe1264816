#include <cmath>
#include <memory>
#include <utility>

#include "kernels/adamw/adamw.h"
#include "kernels/bench/bench.h"
#include "kernels/elementwise/elementwise.h"

namespace tapeline::bench {
namespace {

struct Data {
  Data(Launch l, int64_t tensors, int64_t n)
      : tensors(tensors),
        param(normal<float>(n, 1)),
        grad(normal<float>(n, 2)),
        m(normal<float>(n, 3)),
        v(n) {
    fill(l, 1.0, view_of(v, {n}));
  }
  // A launch for each tensor, as the trainer has it.
  void step(Launch l) {
    const int64_t n = param.size() / tensors;
    const Shape shape{tensors, n};
    const View<float> p = view_of(param, shape), m_ = view_of(m, shape),
                      v_ = view_of(v, shape);
    const View<const float> g = view_of(grad, shape);
    for (int64_t t = 0; t < tensors; ++t) {
      adamw<float>(l, p[t], g[t], m_[t], v_[t], options);
    }
  }
  AdamWOptions options = {.lr = 1e-3, .weight_decay = 0.1, .step = 10};
  int64_t tensors;
  Array<float> param, grad, m, v;
};

Run make(const Arguments& a) {
  auto data = std::make_shared<Data>(a.launch, a.dims[0], a.dims[1]);
  // In place: what the last timed launch read is gone, so the check makes the
  // same launch once more and keeps a copy of what it reads.
  return {.launch = [data, l = a.launch] { data->step(l); },
          .cost = adamw_cost(a.dims[1]),
          .verify =
              [data, l = a.launch](Verifier& verifier) {
                const Data old = *data;
                data->step(l);
                const AdamWOptions& o = old.options;
                std::vector<float> got;
                std::vector<double> expected;
                for (int64_t i : sampled_rows(old.param.size(), 1024)) {
                  const double g = old.grad[i];
                  const double m = o.beta1 * old.m[i] + (1 - o.beta1) * g;
                  const double v = o.beta2 * old.v[i] + (1 - o.beta2) * g * g;
                  const double update =
                      m / (1 - std::pow(o.beta1, o.step)) /
                      (std::sqrt(v / (1 - std::pow(o.beta2, o.step))) + o.eps);
                  expected.push_back(
                      old.param[i] -
                      o.lr * (update + o.weight_decay * old.param[i]));
                  got.push_back(data->param[i]);
                }
                verifier.row(view_of(std::as_const(got),
                                     {static_cast<int64_t>(got.size())}),
                             expected);
              }};
}

const bool added =
    add({"adamw",
         "adamw",
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
