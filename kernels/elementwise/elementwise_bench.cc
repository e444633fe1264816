#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/elementwise/elementwise.h"

namespace tapeline::bench {
namespace {

template <class T>
Run make_add(const Arguments& a) {
  const int64_t n = a.dims[0], d = a.dims[1];
  struct Data {
    std::vector<T> x, z, y;
  };
  auto data = std::make_shared<Data>(
      Data{normal<T>(n * d, 1), normal<T>(n * d, 2), std::vector<T>(n * d)});
  const Shape shape{n, d};
  return {.launch =
              [=, l = a.launch] {
                const Data& in = *data;
                add(l, view_of(in.x, shape), view_of(in.z, shape),
                    view_of(data->y, shape));
              },
          .cost = {.flops = double(n * d), .bytes = 3.0 * n * d * sizeof(T)},
          .verify =
              [=](Verifier& verifier) {
                for (int64_t i : sampled_rows(n)) {
                  std::vector<double> sum(d);
                  for (int64_t j = 0; j < d; ++j) {
                    sum[j] =
                        double(data->x[i * d + j]) + double(data->z[i * d + j]);
                  }
                  verifier.row(View<const T>(data->y.data() + i * d, Shape{d}),
                               sum);
                }
              }};
}

Run make(const Arguments& a) {
  return dispatch_float(a.dtype, [&]<class T>() { return make_add<T>(a); });
}

const bool added =
    add({"elementwise", "add", {"T", "H"}, {{1024, 128}, {4096, 1024}}, make});

}  // namespace
}  // namespace tapeline::bench
