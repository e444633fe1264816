#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/combine/combine.h"
#include "kernels/route/route_cases.h"

namespace tapeline::bench {
namespace {

constexpr int64_t kExperts = 64;

template <class T>
struct Data {
  using A = Accumulator<T>;
  explicit Data(const std::vector<int64_t>& dims)
      : tokens(dims[0]),
        width(dims[1]),
        top_k(dims[2]),
        tables(tables_of({"", tokens, top_k, kExperts, 0, Load::kRandom})),
        device_row(tables.row),
        x(normal<T>(tokens * top_k * width, 1)),
        dx(x.size()),
        y(normal<T>(tokens * width, 2)),
        weight(normal<A>(tokens * top_k, 3)),
        dweight(weight.size()) {}
  View<const int32_t> row() const {
    return view_of(device_row, {tokens, top_k});
  }
  int64_t row_of(int64_t t, int64_t k) const {
    return tables.row[t * top_k + k];
  }
  int64_t tokens, width, top_k;
  RouteTables tables;
  Array<int32_t> device_row;
  Array<T> x, dx, y;
  Array<A> weight, dweight;
};

template <class T>
Run make_forward(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a.dims);
  const Data<T>& in = *data;
  const int64_t width = in.width, rows = in.tables.capacity;
  return {.launch =
              [=, l = a.launch, &in] {
                combine_forward(l, view_of(in.x, {rows, width}),
                                view_of(in.weight, {in.tokens, in.top_k}),
                                in.row(), view_of(data->y, {in.tokens, width}));
              },
          .cost = combine_forward_cost(in.tokens, width, in.top_k, sizeof(T)),
          .verify =
              [=, &in](Verifier& verifier) {
                for (int64_t t : sampled_rows(in.tokens)) {
                  std::vector<double> sum(width);
                  for (int64_t k = 0; k < in.top_k; ++k) {
                    const int64_t r = in.row_of(t, k);
                    const double w = in.weight[t * in.top_k + k];
                    for (int64_t d = 0; d < width; ++d) {
                      sum[d] += w * double(in.x[r * width + d]);
                    }
                  }
                  verifier.row(in.y.row(t * width, width), sum, in.top_k);
                }
              }};
}

template <class T>
Run make_backward(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a.dims);
  const Data<T>& in = *data;
  const int64_t width = in.width, rows = in.tables.capacity;
  return {.launch =
              [=, l = a.launch, &in] {
                combine_backward(l, view_of(in.y, {in.tokens, width}),
                                 view_of(in.x, {rows, width}),
                                 view_of(in.weight, {in.tokens, in.top_k}),
                                 in.row(), view_of(data->dx, {rows, width}),
                                 view_of(data->dweight, {in.tokens, in.top_k}));
              },
          .cost = combine_backward_cost(in.tokens, width, in.top_k, sizeof(T)),
          .verify =
              [=, &in](Verifier& verifier) {
                for (int64_t t : sampled_rows(in.tokens)) {
                  for (int64_t k = 0; k < in.top_k; ++k) {
                    const int64_t r = in.row_of(t, k);
                    std::vector<double> expected(width);
                    for (int64_t d = 0; d < width; ++d) {
                      expected[d] = double(in.weight[t * in.top_k + k]) *
                                    double(in.y[t * width + d]);
                    }
                    verifier.row(in.dx.row(r * width, width), expected);
                  }
                }
              }};
}

Run forward(const Arguments& a) {
  return dispatch_float(a.dtype, [&]<class T>() { return make_forward<T>(a); });
}
Run backward(const Arguments& a) {
  return dispatch_float(a.dtype,
                        [&]<class T>() { return make_backward<T>(a); });
}

const std::vector<std::vector<int64_t>> kShapes = {
    {1024, 128, 2}, {1024, 2048, 8}, {1024, 6144, 8}};
const std::vector<std::vector<int64_t>> kModels = {
    {8192, 7168, 8}, {8192, 6144, 8}, {16384, 2048, 8}};
const std::vector<std::string> kKeys = {"T", "H", "k"};
const Limits kLimits = {.broken = [](const std::vector<int64_t>& d) {
  return at_most(INT32_MAX / d[2], "T", d[0]);  // rows are int32
}};
const bool added =
    add({"combine", "combine_fwd", kKeys, kShapes, forward, kModels},
        kLimits) &&
    add({"combine", "combine_bwd", kKeys, kShapes, backward, kModels}, kLimits);

}  // namespace
}  // namespace tapeline::bench
