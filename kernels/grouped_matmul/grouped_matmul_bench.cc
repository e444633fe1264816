#include <cmath>
#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/grouped_matmul/grouped_matmul.h"

namespace tapeline::bench {
namespace {

// Experts share rows by weights exp(z / 2), z normal, as routers do that are
// not balanced; the second one has none. Nothing is aligned to a tile.
std::vector<int32_t> skewed_offsets(int64_t experts, int64_t rows) {
  const Array<float> z = normal<float>(experts, 7);
  std::vector<double> weight;
  double total = 0;
  for (int64_t e = 0; e < experts; ++e) {
    weight.push_back(experts > 2 && e == 1 ? 0 : std::exp(0.5 * z[e]));
    total += weight.back();
  }
  std::vector<int32_t> offsets = {0};
  double edge = 0;
  for (int64_t e = 0; e + 1 < experts; ++e) {
    edge += weight[e] / total * static_cast<double>(rows);
    offsets.push_back(static_cast<int32_t>(edge));
  }
  offsets.push_back(static_cast<int32_t>(rows));
  return offsets;
}

enum class Pass { kForward, kDgrad, kWgrad };

// Arrays that the pass has no use for stay empty.
template <class T>
struct Data {
  Data(const Arguments& a, Pass pass)
      : e(a.dims[0]),
        r(a.dims[1]),
        f(a.dims[2]),
        d(a.dims[3]),
        offsets(skewed_offsets(e, r)),
        device_offsets(offsets) {
    if (pass != Pass::kDgrad) x = normal<T>(r * d, 1);
    if (pass != Pass::kForward) dy = normal<T>(r * f, 2);
    if (pass != Pass::kWgrad) w = normal<T>(e * f * d, 3);
    if (pass == Pass::kForward) y = Array<T>(r * f);
    if (pass == Pass::kDgrad) dx = Array<T>(r * d);
    if (pass == Pass::kWgrad) dw = Array<Accumulator<T>>(e * f * d);
  }
  View<const int32_t> offset_view() const {
    return view_of(device_offsets, {e + 1});
  }
  int64_t expert(int64_t row) const {
    int64_t at = 0;
    while (offsets[at + 1] <= row) ++at;
    return at;
  }
  Run run(std::function<void()> launch,
          std::function<void(Verifier&)> verify) const {
    return {std::move(launch),
            grouped_matmul_cost(e, r, f, d, sizeof(T)),
            std::move(verify),
            {r, f, d}};
  }

  int64_t e, r, f, d;
  std::vector<int32_t> offsets;
  Array<int32_t> device_offsets;
  Array<T> x, dy, w, y, dx;
  Array<Accumulator<T>> dw;
};

// Columns of a result that are computed again.
constexpr int64_t kColumns = 128;

template <class T>
Run make_forward(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a, Pass::kForward);
  return data->run(
      [data, l = a.launch] {
        const Data<T>& in = *data;
        grouped_matmul_forward(
            l, view_of(in.x, {in.r, in.d}), view_of(in.w, {in.e, in.f, in.d}),
            in.offset_view(), view_of(data->y, {in.r, in.f}));
      },
      [data](Verifier& verifier) {
        const Data<T>& in = *data;
        const std::vector<int64_t> columns = sampled_rows(in.f, kColumns);
        for (int64_t i : sampled_rows(in.r)) {
          const T* x = in.x.host(i * in.d, in.d);
          std::vector<double> row;
          for (int64_t j : columns) {
            const T* w = in.w.host((in.expert(i) * in.f + j) * in.d, in.d);
            double sum = 0;
            for (int64_t k = 0; k < in.d; ++k) {
              sum += double(x[k]) * double(w[k]);
            }
            row.push_back(sum);
          }
          const std::vector<T> got = at_columns(in.y, i, in.f, columns);
          verifier.row(view_of(got, {static_cast<int64_t>(row.size())}), row,
                       in.d);
        }
      });
}

template <class T>
Run make_dgrad(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a, Pass::kDgrad);
  return data->run(
      [data, l = a.launch] {
        const Data<T>& in = *data;
        grouped_matmul_dgrad(l, view_of(in.dy, {in.r, in.f}),
                             view_of(in.w, {in.e, in.f, in.d}),
                             in.offset_view(), view_of(data->dx, {in.r, in.d}));
      },
      [data](Verifier& verifier) {
        const Data<T>& in = *data;
        const std::vector<int64_t> columns = sampled_rows(in.d, kColumns);
        for (int64_t i : sampled_rows(in.r, 4)) {
          const T* dy = in.dy.host(i * in.f, in.f);
          const T* w = in.w.host(in.expert(i) * in.f * in.d, in.f * in.d);
          std::vector<double> row(columns.size());
          for (int64_t j = 0; j < in.f; ++j) {
            for (size_t c = 0; c < columns.size(); ++c) {
              row[c] += double(dy[j]) * double(w[j * in.d + columns[c]]);
            }
          }
          const std::vector<T> got = at_columns(in.dx, i, in.d, columns);
          verifier.row(view_of(got, {static_cast<int64_t>(row.size())}), row,
                       in.f);
        }
      });
}

template <class T>
Run make_wgrad(const Arguments& a) {
  using G = Accumulator<T>;
  auto data = std::make_shared<Data<T>>(a, Pass::kWgrad);
  const auto launch = [data, l = a.launch] {
    const Data<T>& in = *data;
    grouped_matmul_wgrad(l, view_of(in.dy, {in.r, in.f}),
                         view_of(in.x, {in.r, in.d}), in.offset_view(),
                         view_of(data->dw, {in.e, in.f, in.d}));
  };
  return data->run(launch, [data, launch](Verifier& verifier) {
    launch_from_zeros(launch, data->dw);
    const Data<T>& in = *data;
    const std::vector<int64_t> columns = sampled_rows(in.d, kColumns);
    // Of the first, the empty, a middle and the last expert.
    for (int64_t e :
         {int64_t{0}, std::min<int64_t>(1, in.e - 1), in.e / 2, in.e - 1}) {
      const int64_t begin = in.offsets[e], rows = in.offsets[e + 1] - begin;
      const int64_t f = e * 37 % in.f;
      const T* dy = in.dy.host(begin * in.f, rows * in.f);
      const T* x = in.x.host(begin * in.d, rows * in.d);
      std::vector<double> row(columns.size());
      for (int64_t r = 0; r < rows; ++r) {
        const double g = double(dy[r * in.f + f]);
        for (size_t c = 0; c < columns.size(); ++c) {
          row[c] += g * double(x[r * in.d + columns[c]]);
        }
      }
      for (double& v : row) v *= kSums;
      const std::vector<G> got = at_columns(in.dw, e * in.f + f, in.d, columns);
      verifier.row(view_of(got, {static_cast<int64_t>(row.size())}), row,
                   cut_terms(rows) + kSums);
    }
  });
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
// Gate and up together, then down: GLM-5.2, DeepSeek-V3 and Qwen3-235B on one
// of 8 ranks, Qwen3-30B on one alone.
const std::vector<std::vector<int64_t>> kModels = {
    {32, 65536, 4096, 6144},   {32, 65536, 6144, 2048}, {32, 65536, 4096, 7168},
    {32, 65536, 7168, 2048},   {16, 65536, 3072, 4096}, {16, 65536, 4096, 1536},
    {128, 131072, 1536, 2048}, {128, 131072, 2048, 768}};
const bool added =
    add({"grouped_matmul", "grouped_fwd", kKeys, kShapes, forward, kModels}) &&
    add({"grouped_matmul", "grouped_dgrad", kKeys, kShapes, dgrad, kModels}) &&
    add({"grouped_matmul", "grouped_wgrad", kKeys, kShapes, wgrad, kModels});

}  // namespace
}  // namespace tapeline::bench
