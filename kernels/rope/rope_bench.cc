#include <cmath>
#include <memory>
#include <vector>

#include "kernels/bench/bench.h"
#include "kernels/rope/rope.h"

namespace tapeline::bench {
namespace {

// Interleaved pairs.
template <class T>
struct Data {
  explicit Data(const Arguments& a)
      : shape{a.dims[0], a.dims[1], a.dims[2]},
        table{a.dims[0], a.dims[2] / 2},
        x(normal<T>(shape.elements(), 1)),
        y(shape.elements()),
        cos(table.elements()),
        sin(table.elements()) {
    std::vector<int32_t> positions(shape[0]);
    for (int64_t t = 0; t < shape[0]; ++t) {
      positions[t] = static_cast<int32_t>(t);
    }
    const Array<int32_t> device_positions(positions);
    rope_table(a.launch, view_of(device_positions, {shape[0]}),
               rope_inverse_frequencies(
                   {.theta = 1e6, .dim = static_cast<int>(shape[2])}),
               1, view_of(cos, table), view_of(sin, table));
  }

  Shape shape, table;
  Array<T> x, y;
  Array<float> cos, sin;
};

template <class T, bool kForward>
Run make(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a);
  return {.launch =
              [data, l = a.launch] {
                const Data<T>& in = *data;
                const auto turn = kForward ? rope_forward<T> : rope_backward<T>;
                turn(l, view_of(in.x, in.shape), view_of(in.cos, in.table),
                     view_of(in.sin, in.table), /*interleaved=*/true,
                     view_of(data->y, in.shape));
              },
          .cost = rope_cost(a.dims[0], a.dims[1], a.dims[2], sizeof(T)),
          .verify =
              [data](Verifier& verifier) {
                const int64_t h = data->shape[1], r = data->shape[2];
                for (int64_t i : sampled_rows(data->shape[0] * h)) {
                  std::vector<double> y(r);
                  for (int64_t j = 0; j < r / 2; ++j) {
                    const double c = data->cos[i / h * r / 2 + j];
                    const double s = data->sin[i / h * r / 2 + j];
                    const T* x = data->x.host(i * r, r);
                    if (kForward) {
                      y[j] = double(x[2 * j]) * c - double(x[2 * j + 1]) * s;
                      y[j + r / 2] =
                          double(x[2 * j + 1]) * c + double(x[2 * j]) * s;
                    } else {
                      y[2 * j] = double(x[j]) * c + double(x[j + r / 2]) * s;
                      y[2 * j + 1] =
                          double(x[j + r / 2]) * c - double(x[j]) * s;
                    }
                  }
                  verifier.row(data->y.row(i * r, r), y);
                }
              }};
}

Run forward(const Arguments& a) {
  return dispatch_float(a.dtype, [&]<class T>() { return make<T, true>(a); });
}
Run backward(const Arguments& a) {
  return dispatch_float(a.dtype, [&]<class T>() { return make<T, false>(a); });
}

const std::vector<std::vector<int64_t>> kShapes = {{1024, 4, 64},
                                                   {4096, 32, 64}};
const std::vector<std::vector<int64_t>> kModels = {{16384, 64, 128}};
const std::vector<std::string> kKeys = {"T", "heads", "d"};
const Limits kLimits = {.broken = [](const std::vector<int64_t>& d) {
  return first_broken(
      {d[2] % 2 == 0 ? "" : "d is even", at_most(INT32_MAX, "d", d[2])});
}};

const bool added =
    add({"rope", "rope_fwd", kKeys, kShapes, forward, kModels}, kLimits) &&
    add({"rope", "rope_bwd", kKeys, kShapes, backward, kModels}, kLimits);

}  // namespace
}  // namespace tapeline::bench
