#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/grouped_matmul/grouped_matmul.h"

namespace tapeline::bench {
namespace {

// Experts with 0.7 to 1.3 times the mean number of rows.
template <class T>
struct Data {
  explicit Data(const Arguments& a)
      : e(a.dims[0]), r(a.dims[1]), f(a.dims[2]), d(a.dims[3]) {
    offsets.push_back(0);
    for (int64_t i = 1; i < e; ++i) {
      const double wobble = 0.3 * ((i * 7) % 5 - 2) / 2;
      const double edge = (static_cast<double>(i) + wobble) / double(e);
      offsets.push_back(static_cast<int32_t>(edge * double(r)));
    }
    offsets.push_back(static_cast<int32_t>(r));
    x = normal<T>(r * d, 1);
    dy = normal<T>(r * f, 2);
    w = normal<T>(e * f * d, 3);
    y.resize(r * f);
    dx.resize(r * d);
    dw.resize(e * f * d);
  }
  int64_t expert(int64_t row) const {
    int64_t at = 0;
    while (offsets[at + 1] <= row) ++at;
    return at;
  }
  Cost cost() const { return grouped_matmul_cost(e, r, f, d, sizeof(T)); }

  int64_t e, r, f, d;
  std::vector<int32_t> offsets;
  std::vector<T> x, dy, w, y, dx;
  std::vector<Accumulator<T>> dw;
};

template <class T>
Run make_forward(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a);
  return {.launch =
              [data, l = a.launch] {
                const Data<T>& in = *data;
                grouped_matmul_forward(l, view_of(in.x, {in.r, in.d}),
                                       view_of(in.w, {in.e, in.f, in.d}),
                                       view_of(in.offsets, {in.e + 1}),
                                       view_of(data->y, {in.r, in.f}));
              },
          .cost = data->cost(),
          .verify =
              [data](Verifier& verifier) {
                const Data<T>& in = *data;
                for (int64_t i : sampled_rows(in.r)) {
                  const T* w = in.w.data() + in.expert(i) * in.f * in.d;
                  std::vector<double> row(in.f);
                  for (int64_t j = 0; j < in.f * in.d; ++j) {
                    row[j / in.d] +=
                        double(w[j]) * double(in.x[i * in.d + j % in.d]);
                  }
                  verifier.row(
                      View<const T>(in.y.data() + i * in.f, Shape{in.f}), row,
                      in.d);
                }
              }};
}

template <class T>
Run make_dgrad(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a);
  return {.launch =
              [data, l = a.launch] {
                const Data<T>& in = *data;
                grouped_matmul_dgrad(l, view_of(in.dy, {in.r, in.f}),
                                     view_of(in.w, {in.e, in.f, in.d}),
                                     view_of(in.offsets, {in.e + 1}),
                                     view_of(data->dx, {in.r, in.d}));
              },
          .cost = data->cost(),
          .verify =
              [data](Verifier& verifier) {
                const Data<T>& in = *data;
                for (int64_t i : sampled_rows(in.r)) {
                  const T* w = in.w.data() + in.expert(i) * in.f * in.d;
                  std::vector<double> row(in.d);
                  for (int64_t j = 0; j < in.f * in.d; ++j) {
                    row[j % in.d] +=
                        double(w[j]) * double(in.dy[i * in.f + j / in.d]);
                  }
                  verifier.row(
                      View<const T>(in.dx.data() + i * in.d, Shape{in.d}), row,
                      in.f);
                }
              }};
}

// Each launch starts from zero, so that the last one's result is known;
// clearing is part of the time.
template <class T>
Run make_wgrad(const Arguments& a) {
  using G = Accumulator<T>;
  auto data = std::make_shared<Data<T>>(a);
  return {.launch =
              [data, l = a.launch] {
                const Data<T>& in = *data;
                std::fill(data->dw.begin(), data->dw.end(), G(0));
                grouped_matmul_wgrad(l, view_of(in.dy, {in.r, in.f}),
                                     view_of(in.x, {in.r, in.d}),
                                     view_of(in.offsets, {in.e + 1}),
                                     view_of(data->dw, {in.e, in.f, in.d}));
              },
          .cost = data->cost(),
          .verify =
              [data](Verifier& verifier) {
                const Data<T>& in = *data;
                for (int64_t i : sampled_rows(in.e * in.f)) {
                  const int64_t e = i / in.f;
                  std::vector<double> row(in.d);
                  for (int64_t r = in.offsets[e]; r < in.offsets[e + 1]; ++r) {
                    for (int64_t j = 0; j < in.d; ++j) {
                      row[j] += double(in.dy[r * in.f + i % in.f]) *
                                double(in.x[r * in.d + j]);
                    }
                  }
                  verifier.row(
                      View<const G>(in.dw.data() + i * in.d, Shape{in.d}), row,
                      in.r);
                }
              }};
}

Run forward(const Arguments& a) {
  return dispatch_float(a.dtype, [&]<class T>() { return make_forward<T>(a); });
}
Run dgrad(const Arguments& a) {
  return dispatch_float(a.dtype, [&]<class T>() { return make_dgrad<T>(a); });
}
Run wgrad(const Arguments& a) {
  return dispatch_float(a.dtype, [&]<class T>() { return make_wgrad<T>(a); });
}

const std::vector<std::string> kKeys = {"E", "rows", "N", "K"};
const std::vector<std::vector<int64_t>> kShapes = {{8, 2048, 256, 128},
                                                   {8, 2048, 128, 256}};
const bool added =
    add({"grouped_matmul", "grouped_fwd", kKeys, kShapes, forward}) &&
    add({"grouped_matmul", "grouped_dgrad", kKeys, kShapes, dgrad}) &&
    add({"grouped_matmul", "grouped_wgrad", kKeys, kShapes, wgrad});

}  // namespace
}  // namespace tapeline::bench
