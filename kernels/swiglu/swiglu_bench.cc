#include <cmath>
#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/swiglu/swiglu.h"

namespace tapeline::bench {
namespace {

template <class T>
struct Data {
  explicit Data(const Arguments& a)
      : shape{a.dims[0], a.dims[1]},
        gate(normal<T>(shape.elements(), 1)),
        up(normal<T>(shape.elements(), 2)),
        dy(normal<T>(shape.elements(), 3)),
        y(shape.elements()),
        dgate(shape.elements()),
        dup(shape.elements()) {}
  View<const T> row(const Array<T>& of, int64_t i) const {
    return of.row(i * shape[1], shape[1]);
  }

  Shape shape;
  Array<T> gate, up, dy, y, dgate, dup;
};

template <class T>
Run make_forward(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a);
  return {.launch =
              [data, l = a.launch] {
                const Data<T>& in = *data;
                swiglu_forward(l, view_of(in.gate, in.shape),
                               view_of(in.up, in.shape),
                               view_of(data->y, in.shape));
              },
          .cost = swiglu_forward_cost(a.dims[0], a.dims[1], sizeof(T)),
          .verify =
              [data](Verifier& verifier) {
                for (int64_t i : sampled_rows(data->shape[0])) {
                  std::vector<double> y(data->shape[1]);
                  for (int64_t j = 0; j < data->shape[1]; ++j) {
                    const double g = data->row(data->gate, i)(j);
                    y[j] = g / (1 + std::exp(-g)) *
                           double(data->row(data->up, i)(j));
                  }
                  verifier.row(data->row(data->y, i), y);
                }
              }};
}

template <class T>
Run make_backward(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a);
  return {.launch =
              [data, l = a.launch] {
                const Data<T>& in = *data;
                swiglu_backward(
                    l, view_of(in.dy, in.shape), view_of(in.gate, in.shape),
                    view_of(in.up, in.shape), view_of(data->dgate, in.shape),
                    view_of(data->dup, in.shape));
              },
          .cost = swiglu_backward_cost(a.dims[0], a.dims[1], sizeof(T)),
          .verify =
              [data](Verifier& verifier) {
                for (int64_t i : sampled_rows(data->shape[0])) {
                  std::vector<double> dgate(data->shape[1]);
                  std::vector<double> dup(data->shape[1]);
                  for (int64_t j = 0; j < data->shape[1]; ++j) {
                    const double g = data->row(data->gate, i)(j);
                    const double d = data->row(data->dy, i)(j);
                    const double s = 1 / (1 + std::exp(-g));
                    dgate[j] = d * double(data->row(data->up, i)(j)) *
                               (s + g * s * (1 - s));
                    dup[j] = d * g * s;
                  }
                  verifier.row(data->row(data->dgate, i), dgate, 20);
                  verifier.row(data->row(data->dup, i), dup);
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

const std::vector<std::vector<int64_t>> kShapes = {{1024, 256}, {4096, 2048}};
const std::vector<std::vector<int64_t>> kModels = {{65536, 2048}};
const std::vector<std::string> kKeys = {"rows", "I"};
const bool added =
    add({"swiglu", "swiglu_fwd", kKeys, kShapes, forward, kModels}) &&
    add({"swiglu", "swiglu_bwd", kKeys, kShapes, backward, kModels});

}  // namespace
}  // namespace tapeline::bench
