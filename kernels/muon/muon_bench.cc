#include <cmath>
#include <memory>
#include <utility>

#include "kernels/bench/bench.h"
#include "kernels/muon/muon.h"

namespace tapeline::bench {
namespace {

Run make(const Arguments& a) {
  const Shape shape{a.dims[0], a.dims[1], a.dims[2]};
  struct Data {
    Array<float> start, update, workspace;
  };
  auto data =
      std::make_shared<Data>(Data{normal<float>(shape.elements(), 1), {}, {}});
  data->update = data->start;
  data->workspace = Array<float>(muon_workspace(shape));
  const auto launch = [=, l = a.launch] {
    muon_orthogonalize<float>(
        l, view_of(data->update, shape),
        view_of(data->workspace, {muon_workspace(shape)}));
  };
  return {
      // In place: later launches start from a nearly orthogonal matrix, at the
      // same speed.
      .launch = launch,
      .cost = muon_orthogonalize_cost(shape),
      .verify = [=](Verifier& verifier) {
        // Rows of the first matrix against the iteration in f64.
        data->update = data->start;
        launch();
        const int64_t m = shape[1], n = shape[2], r = std::min(m, n);
        const auto at = [&](int64_t i, int64_t j) {
          return m <= n ? i * n + j : j * n + i;  // short side first
        };
        const int64_t length = std::max(m, n);
        const float* start = data->start.host(0, m * n);
        std::vector<double> x(m * n);
        double norm = 0;
        for (int64_t i = 0; i < m * n; ++i) {
          norm += double(start[i]) * start[i];
        }
        for (int64_t i = 0; i < r; ++i) {
          for (int64_t j = 0; j < length; ++j) {
            x[i * length + j] = start[at(i, j)] / std::sqrt(norm);
          }
        }
        for (int step = 0; step < 5; ++step) {
          std::vector<double> s(r * r), p(r * r), y(m * n);
          for (int64_t i = 0; i < r; ++i) {
            for (int64_t k = 0; k < r; ++k) {
              for (int64_t j = 0; j < length; ++j) {
                s[i * r + k] += x[i * length + j] * x[k * length + j];
              }
            }
          }
          for (int64_t i = 0; i < r; ++i) {
            for (int64_t k = 0; k < r; ++k) {
              for (int64_t j = 0; j < r; ++j) {
                p[i * r + j] += 2.0315 * s[i * r + k] * s[k * r + j];
              }
            }
            for (int64_t j = 0; j < r; ++j) {
              p[i * r + j] += -4.7750 * s[i * r + j] + 3.4445 * (i == j);
            }
          }
          for (int64_t i = 0; i < r; ++i) {
            for (int64_t k = 0; k < r; ++k) {
              for (int64_t j = 0; j < length; ++j) {
                y[i * length + j] += p[i * r + k] * x[k * length + j];
              }
            }
          }
          x = y;
        }
        std::vector<float> got(length);
        for (int64_t i : sampled_rows(r)) {
          for (int64_t j = 0; j < length; ++j) {
            got[j] = data->update[at(i, j)];
          }
          // The steps amplify rounding in directions of small singular
          // values.
          verifier.row(view_of(std::as_const(got), {length}),
                       {&x[i * length], &x[i * length] + length},
                       10000 * length);
        }
      }};
}

const bool added = add({"muon",
                        "muon_orthogonalize",
                        {"B", "M", "N"},
                        {{64, 64, 128}, {8, 128, 32}, {1, 256, 256}},
                        make,
                        {{16, 256, 512}},
                        DType::kF32},
                       {.dtypes = {DType::kF32}});

}  // namespace
}  // namespace tapeline::bench
