#include <cmath>
#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/rms_norm/rms_norm.h"

namespace tapeline::bench {
namespace {

constexpr float kEps = 1e-5f;

template <class T>
struct Data {
  explicit Data(const Arguments& a)
      : n(a.dims[0]),
        d(a.dims[1]),
        x(normal<T>(n * d, 1)),
        w(normal<T>(d, 2)),
        dy(normal<T>(n * d, 3)),
        y(n * d),
        dx(n * d),
        rstd(n),
        dw(d) {}
  void forward(Launch l) {
    const Data& in = *this;
    rms_norm_forward(l, view_of(in.x, {n, d}), view_of(in.w, {d}), kEps,
                     view_of(y, {n, d}), view_of(rstd, {n}));
  }
  void backward(Launch l) {
    const Data& in = *this;
    rms_norm_backward(l, view_of(in.dy, {n, d}), view_of(in.x, {n, d}),
                      view_of(in.w, {d}), view_of(in.rstd, {n}),
                      view_of(dx, {n, d}));
    rms_norm_backward_weight(l, view_of(in.dy, {n, d}), view_of(in.x, {n, d}),
                             view_of(in.rstd, {n}), view_of(dw, {d}));
  }
  // rstd of row i, and the mean of dy * w * x.
  std::pair<double, double> row(int64_t i) const {
    double squares = 0, projection = 0;
    for (int64_t j = 0; j < d; ++j) {
      const double v = x[i * d + j];
      squares += v * v;
      projection += double(dy[i * d + j]) * double(w[j]) * v;
    }
    return {1 / std::sqrt(squares / d + kEps), projection / d};
  }

  int64_t n, d;
  std::vector<T> x, w, dy, y, dx;
  std::vector<Accumulator<T>> rstd, dw;
};

template <class T>
Run make_forward(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a);
  return {.launch = [data, l = a.launch] { data->forward(l); },
          .cost = rms_norm_forward_cost(data->n, data->d, sizeof(T)),
          .verify =
              [data](Verifier& verifier) {
                const int64_t d = data->d;
                for (int64_t i : sampled_rows(data->n)) {
                  const double rstd = data->row(i).first;
                  std::vector<double> y(d);
                  for (int64_t j = 0; j < d; ++j) {
                    y[j] =
                        double(data->x[i * d + j]) * rstd * double(data->w[j]);
                  }
                  verifier.row(View<const T>(data->y.data() + i * d, Shape{d}),
                               y, d);
                }
              }};
}

// dx and dw. dw grows with every launch, so dx alone is checked.
template <class T>
Run make_backward(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a);
  data->forward(a.launch);
  return {.launch = [data, l = a.launch] { data->backward(l); },
          .cost = rms_norm_backward_cost(data->n, data->d, sizeof(T)),
          .verify =
              [data](Verifier& verifier) {
                const int64_t d = data->d;
                for (int64_t i : sampled_rows(data->n)) {
                  const auto [rstd, projection] = data->row(i);
                  std::vector<double> dx(d);
                  for (int64_t j = 0; j < d; ++j) {
                    const double x = data->x[i * d + j];
                    dx[j] = rstd *
                            (double(data->dy[i * d + j]) * double(data->w[j]) -
                             x * rstd * rstd * projection);
                  }
                  verifier.row(View<const T>(data->dx.data() + i * d, Shape{d}),
                               dx, d);
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
    {512, 128}, {1024, 128}, {4096, 2048}};
const bool added =
    add({"rms_norm", "rmsnorm_fwd", {"T", "H"}, kShapes, forward}) &&
    add({"rms_norm", "rmsnorm_bwd", {"T", "H"}, kShapes, backward});

}  // namespace
}  // namespace tapeline::bench
