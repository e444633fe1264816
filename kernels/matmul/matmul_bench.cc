#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/matmul/matmul.h"

namespace tapeline::bench {
namespace {

template <class T>
Run make_gemm(const Arguments& a) {
  const int64_t m = a.dims[0], n = a.dims[1], k = a.dims[2];
  struct Data {
    Array<T> x, w, y;
  };
  auto data = std::make_shared<Data>(
      Data{normal<T>(m * k, 1), normal<T>(n * k, 2), Array<T>(m * n)});
  return {.launch =
              [=, l = a.launch] {
                const Data& in = *data;
                matmul(l, view_of(in.x, {m, k}), view_of(in.w, {n, k}),
                       view_of(data->y, {m, n}), {.transpose_b = true});
              },
          .cost = matmul_cost(1, m, n, k, sizeof(T)),
          .verify =
              [=](Verifier& verifier) {
                const std::vector<int64_t> columns = sampled_rows(n, 128);
                for (int64_t i : sampled_rows(m)) {
                  const T* x = data->x.host(i * k, k);
                  std::vector<double> row;
                  for (int64_t j : columns) {
                    const T* w = data->w.host(j * k, k);
                    double sum = 0;
                    for (int64_t p = 0; p < k; ++p) {
                      sum += double(x[p]) * double(w[p]);
                    }
                    row.push_back(sum);
                  }
                  const std::vector<T> got = at_columns(data->y, i, n, columns);
                  verifier.row(view_of(got, {static_cast<int64_t>(row.size())}),
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
                        make,
                        {{8192, 8192, 8192},
                         {8192, 4096, 7168},
                         {8192, 7168, 2048},
                         {16384, 1536, 2048}}});

}  // namespace
}  // namespace tapeline::bench
