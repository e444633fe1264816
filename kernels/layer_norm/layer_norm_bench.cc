#include <cmath>
#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/layer_norm/layer_norm.h"

namespace tapeline::bench {
namespace {

constexpr float kEps = 1e-6f;

template <class T>
struct Data {
  explicit Data(const Arguments& a)
      : n(a.dims[0]),
        d(a.dims[1]),
        x(normal<T>(n * d, 1)),
        w(normal<T>(d, 2)),
        b(normal<T>(d, 3)),
        dy(normal<T>(n * d, 4)),
        y(n * d),
        dx(n * d),
        mean(n),
        rstd(n),
        dw(d),
        db(d) {}
  void forward(Launch l) {
    const Data& in = *this;
    layer_norm_forward(l, view_of(in.x, {n, d}), view_of(in.w, {d}),
                       view_of(in.b, {d}), kEps, view_of(y, {n, d}),
                       view_of(mean, {n}), view_of(rstd, {n}));
  }
  void backward(Launch l) {
    const Data& in = *this;
    using A = Accumulator<T>;
    const View<T> dx_view = view_of(dx, {n, d});
    const int64_t parts =
        layer_norm_parts(l, view_of(in.dy, {n, d}), view_of(in.x, {n, d}),
                         view_of(in.w, {d}), dx_view);
    if (partial.size() != parts * 2 * d) partial = Array<A>(parts * 2 * d);
    const View<A> partial_view = view_of(partial, {parts, 2, d});
    layer_norm_backward(l, view_of(in.dy, {n, d}), view_of(in.x, {n, d}),
                        view_of(in.w, {d}), view_of(in.mean, {n}),
                        view_of(in.rstd, {n}), dx_view,
                        parts > 0 ? partial_view : View<A>());
    if (parts > 0) {
      return layer_norm_add_parts(l, View<const A>(partial_view),
                                  view_of(dw, {d}), view_of(db, {d}));
    }
    layer_norm_backward_weight(l, view_of(in.dy, {n, d}), view_of(in.x, {n, d}),
                               view_of(in.mean, {n}), view_of(in.rstd, {n}),
                               view_of(dw, {d}), view_of(db, {d}));
  }
  // (x - mean) * rstd of row i; *r is rstd.
  std::vector<double> normalized(int64_t i, double* r) const {
    std::vector<double> h(d);
    long double m = 0, variance = 0;  // f64 is tried as well
    for (int64_t j = 0; j < d; ++j) m += double(x[i * d + j]);
    m /= d;
    for (int64_t j = 0; j < d; ++j) {
      h[j] = static_cast<double>(double(x[i * d + j]) - m);
      variance += h[j] * h[j];
    }
    *r = static_cast<double>(1 / std::sqrt(variance / d + kEps));
    for (double& v : h) v *= *r;
    return h;
  }

  int64_t n, d;
  Array<T> x, w, b, dy, y, dx;
  Array<Accumulator<T>> mean, rstd, dw, db, partial;
};

template <class T>
Run make_forward(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a);
  return {.launch = [data, l = a.launch] { data->forward(l); },
          .cost = layer_norm_forward_cost(data->n, data->d, sizeof(T)),
          .verify =
              [data](Verifier& verifier) {
                const int64_t d = data->d;
                for (int64_t i : sampled_rows(data->n)) {
                  double rstd;
                  std::vector<double> y = data->normalized(i, &rstd);
                  for (int64_t j = 0; j < d; ++j) {
                    y[j] = y[j] * double(data->w[j]) + double(data->b[j]);
                  }
                  verifier.row(data->y.row(i * d, d), y, d);
                }
              }};
}

// dx, dw and db.
template <class T>
Run make_backward(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a);
  data->forward(a.launch);
  const auto launch = [data, l = a.launch] { data->backward(l); };
  return {.launch = launch,
          .cost = layer_norm_backward_cost(data->n, data->d, sizeof(T)),
          .verify = [data, launch](Verifier& verifier) {
            launch_from_zeros(launch, data->dw, data->db);
            const int64_t d = data->d;
            for (int64_t i : sampled_rows(data->n)) {
              double rstd, g = 0, gh = 0;
              std::vector<double> dx = data->normalized(i, &rstd);
              const auto g_at = [&](int64_t j) {
                return double(data->dy[i * d + j]) * double(data->w[j]);
              };
              for (int64_t j = 0; j < d; ++j) {
                g += g_at(j) / d;
                gh += g_at(j) * dx[j] / d;
              }
              for (int64_t j = 0; j < d; ++j) {
                dx[j] = rstd * (g_at(j) - g - dx[j] * gh);
              }
              verifier.row(data->dx.row(i * d, d), dx, d);
            }
            const std::vector<int64_t> columns = sampled_rows(d, 64);
            const Shape shape{static_cast<int64_t>(columns.size())};
            std::vector<double> dw(columns.size()), db(columns.size());
            for (int64_t i = 0; i < data->n; ++i) {
              const T* dy = data->dy.host(i * d, d);
              const T* x = data->x.host(i * d, d);
              const double mean = data->mean[i], rstd = data->rstd[i];
              for (size_t c = 0; c < columns.size(); ++c) {
                const double g = kSums * double(dy[columns[c]]);
                dw[c] += g * (double(x[columns[c]]) - mean) * rstd;
                db[c] += g;
              }
            }
            const auto got_dw = at_columns(data->dw, 0, d, columns);
            const auto got_db = at_columns(data->db, 0, d, columns);
            verifier.row(view_of(got_dw, shape), dw, data->n + kSums);
            verifier.row(view_of(got_db, shape), db, data->n + kSums);
          }};
}

Run forward(const Arguments& a) {
  return dispatch_float(a.dtype, [&]<class T>() { return make_forward<T>(a); });
}
Run backward(const Arguments& a) {
  return dispatch_float(a.dtype,
                        [&]<class T>() { return make_backward<T>(a); });
}

const std::vector<std::vector<int64_t>> kShapes = {{1024, 128}, {4096, 2048}};
// The indexer's key norm (GLM-5.2, DeepSeek-V3.2).
const std::vector<std::vector<int64_t>> kModels = {{65536, 128}};
const std::vector<std::string> kKeys = {"T", "H"};
const bool added =
    add({"layer_norm", "layernorm_fwd", kKeys, kShapes, forward, kModels}) &&
    add({"layer_norm", "layernorm_bwd", kKeys, kShapes, backward, kModels});

}  // namespace
}  // namespace tapeline::bench
