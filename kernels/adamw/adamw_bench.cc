#include <cmath>
#include <memory>
#include <utility>

#include "kernels/adamw/adamw.h"
#include "kernels/bench/bench.h"

namespace tapeline::bench {
namespace {

struct Data {
  explicit Data(int64_t n)
      : param(normal<float>(n, 1)),
        grad(normal<float>(n, 2)),
        m(normal<float>(n, 3)),
        v(n, 1.0f) {}
  void step(Launch l) {
    const Shape shape{static_cast<int64_t>(param.size())};
    adamw<float>(l, view_of(param, shape), view_of(grad, shape),
                 view_of(m, shape), view_of(v, shape), options);
  }
  AdamWOptions options = {.lr = 1e-3, .weight_decay = 0.1, .step = 10};
  std::vector<float> param, grad, m, v;
};

Run make(const Arguments& a) {
  CHECK(a.dtype == DType::kF32) << "[adamw] values are f32 here";
  auto data = std::make_shared<Data>(a.dims[0]);
  return {.launch = [data, l = a.launch] { data->step(l); },
          .cost = adamw_cost(a.dims[0]),
          .verify =
              [data, l = a.launch](Verifier& verifier) {
                const Data old = *data;
                data->step(l);
                const AdamWOptions& o = old.options;
                std::vector<float> got;
                std::vector<double> expected;
                for (int64_t i :
                     sampled_rows(static_cast<int64_t>(old.param.size()))) {
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
    add({"adamw", "adamw", {"params"}, {{100000}, {16777216}}, make});

}  // namespace
}  // namespace tapeline::bench
