#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/matmul/matmul.h"

namespace tapeline::bench {
namespace {

template <class T>
Run make_gemm(const Arguments& a) {
  const int64_t m = a.dims[0], n = a.dims[1], k = a.dims[2];
  struct Data {
    std::vector<T> x, w, y;
  };
  auto data = std::make_shared<Data>(
      Data{normal<T>(m * k, 1), normal<T>(n * k, 2), std::vector<T>(m * n)});
  return {.launch =
              [=, l = a.launch] {
                const Data& in = *data;
                matmul(l, view_of(in.x, {m, k}), view_of(in.w, {n, k}),
                       view_of(data->y, {m, n}), {.transpose_b = true});
              },
          .cost = matmul_cost(1, m, n, k, sizeof(T)),
          .verify =
              [=](Verifier& verifier) {
                for (int64_t i : sampled_rows(m)) {
                  std::vector<double> row(n);
                  for (int64_t j = 0; j < n; ++j) {
                    for (int64_t p = 0; p < k; ++p) {
                      row[j] += double(data->x[i * k + p]) *
                                double(data->w[j * k + p]);
                    }
                  }
                  verifier.row(View<const T>(data->y.data() + i * n, Shape{n}),
                               row, k);
                }
              }};
}

Run make(const Arguments& a) {
  return dispatch_float(a.dtype, [&]<class T>() { return make_gemm<T>(a); });
}

// y = x w^T, as in a linear layer.
const bool added = add({"matmul",
                        "gemm",
                        {"m", "n", "k"},
                        {{1024, 256, 128},
                         {512, 128, 128},
                         {2048, 512, 128},
                         {128, 256, 1024},
                         {1024, 1024, 1024}},
                        make});

}  // namespace
}  // namespace tapeline::bench
