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
    const View<T> dx_view = view_of(dx, {n, d});
    const int64_t parts =
        rms_norm_parts(l, view_of(in.dy, {n, d}), view_of(in.x, {n, d}),
                       view_of(in.w, {d}), dx_view);
    if (partial.size() != parts * d) {
      partial = Array<Accumulator<T>>(parts * d);
    }
    const View<Accumulator<T>> partial_view = view_of(partial, {parts, d});
    rms_norm_backward(l, view_of(in.dy, {n, d}), view_of(in.x, {n, d}),
                      view_of(in.w, {d}), view_of(in.rstd, {n}), dx_view,
                      parts > 0 ? partial_view : View<Accumulator<T>>());
    if (parts > 0) {
      return rms_norm_add_parts(l, View<const Accumulator<T>>(partial_view),
                                view_of(dw, {d}));
    }
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
  Array<T> x, w, dy, y, dx;
  Array<Accumulator<T>> rstd, dw, partial;
};

// The normed value is rounded before the weight.
template <class T>
double weighted(double normed, T w) {
  return double(T(static_cast<Accumulator<T>>(normed))) * double(w);
}

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
                    y[j] = weighted<T>(double(data->x[i * d + j]) * rstd,
                                       data->w[j]);
                  }
                  verifier.row(data->y.row(i * d, d), y, d);
                }
              }};
}

// The residual's sum and its norm.
template <class T>
Run make_add_norm(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a);
  auto sum = std::make_shared<Array<T>>(data->n * data->d);
  return {.launch =
              [data, sum, l = a.launch] {
                const Data<T>& in = *data;
                const int64_t n = in.n, d = in.d;
                add_rms_norm_forward(
                    l, view_of(in.x, {n, d}), view_of(in.dy, {n, d}),
                    view_of(in.w, {d}), kEps, view_of(*sum, {n, d}),
                    view_of(data->y, {n, d}), view_of(data->rstd, {n}));
              },
          .cost = {.bytes = 4.0 * data->n * data->d * sizeof(T)},
          .verify =
              [data, sum](Verifier& verifier) {
                const int64_t d = data->d;
                for (int64_t i : sampled_rows(data->n)) {
                  const T* x = data->x.host(i * d, d);
                  const T* residual = data->dy.host(i * d, d);
                  const T* s = sum->host(i * d, d);
                  std::vector<double> both(d), y(d);
                  double squares = 0;
                  for (int64_t j = 0; j < d; ++j) {
                    both[j] = double(x[j]) + double(residual[j]);
                    squares += double(s[j]) * double(s[j]);
                  }
                  const double rstd = 1 / std::sqrt(squares / d + kEps);
                  for (int64_t j = 0; j < d; ++j) {
                    y[j] = weighted<T>(double(s[j]) * rstd, data->w[j]);
                  }
                  verifier.row(sum->row(i * d, d), both);
                  verifier.row(data->y.row(i * d, d), y, d);
                }
              }};
}

// dx and dw.
template <class T>
Run make_backward(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a);
  data->forward(a.launch);
  const auto launch = [data, l = a.launch] { data->backward(l); };
  return {.launch = launch,
          .cost = rms_norm_backward_cost(data->n, data->d, sizeof(T)),
          .verify = [data, launch](Verifier& verifier) {
            launch_from_zeros(launch, data->dw);
            const int64_t d = data->d;
            for (int64_t i : sampled_rows(data->n)) {
              const auto [rstd, projection] = data->row(i);
              std::vector<double> dx(d);
              for (int64_t j = 0; j < d; ++j) {
                const double x = data->x[i * d + j];
                dx[j] =
                    rstd * (double(data->dy[i * d + j]) * double(data->w[j]) -
                            x * rstd * rstd * projection);
              }
              verifier.row(data->dx.row(i * d, d), dx, d);
            }
            const std::vector<int64_t> columns = sampled_rows(d, 64);
            std::vector<double> dw(columns.size());
            for (int64_t i = 0; i < data->n; ++i) {
              const T* dy = data->dy.host(i * d, d);
              const T* x = data->x.host(i * d, d);
              const double rstd = data->rstd[i];
              for (size_t c = 0; c < columns.size(); ++c) {
                dw[c] += double(dy[columns[c]]) * double(x[columns[c]]) * rstd *
                         kSums;
              }
            }
            const auto got = at_columns(data->dw, 0, d, columns);
            verifier.row(view_of(got, {static_cast<int64_t>(dw.size())}), dw,
                         data->n + kSums);
          }};
}

Run forward(const Arguments& a) {
  return dispatch_float(a.dtype, [&]<class T>() { return make_forward<T>(a); });
}
Run add_norm(const Arguments& a) {
  return dispatch_float(a.dtype,
                        [&]<class T>() { return make_add_norm<T>(a); });
}
Run backward(const Arguments& a) {
  return dispatch_float(a.dtype,
                        [&]<class T>() { return make_backward<T>(a); });
}

const std::vector<std::vector<int64_t>> kShapes = {
    {512, 128}, {1024, 128}, {4096, 2048}};
const std::vector<std::vector<int64_t>> kModels = {{16384, 7168},
                                                   {32768, 2048}};
const std::vector<std::string> kKeys = {"T", "H"};
const bool added =
    add({"rms_norm", "rmsnorm_fwd", kKeys, kShapes, forward, kModels}) &&
    add({"rms_norm", "add_rmsnorm_fwd", kKeys, kShapes, add_norm, kModels}) &&
    add({"rms_norm", "rmsnorm_bwd", kKeys, kShapes, backward, kModels});

}  // namespace
}  // namespace tapeline::bench
