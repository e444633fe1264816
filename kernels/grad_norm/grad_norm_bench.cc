#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/grad_norm/grad_norm.h"

namespace tapeline::bench {
namespace {

Run make(const Arguments& a) {
  CHECK(a.dtype == DType::kF32) << "[grad_norm] values are f32 here";
  struct Data {
    std::vector<float> x;
    double norm = 0;
  };
  auto data = std::make_shared<Data>(Data{normal<float>(a.dims[0], 1)});
  return {.launch =
              [=, l = a.launch, n = a.dims[0]] {
                data->norm = squared_norm<float>(l, view_of(data->x, {n}));
              },
          .cost = squared_norm_cost(a.dims[0]),
          .verify =
              [=](Verifier& verifier) {
                long double sum = 0;
                for (float x : data->x) sum += static_cast<long double>(x) * x;
                verifier.row(View<const double>(&data->norm, Shape{1}),
                             {static_cast<double>(sum)}, a.dims[0]);
              }};
}

const bool added = add(
    {"grad_norm", "clip_grad_norm", {"params"}, {{100000}, {16777216}}, make});

}  // namespace
}  // namespace tapeline::bench
