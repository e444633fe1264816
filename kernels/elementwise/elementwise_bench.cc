#include <memory>

#include "kernels/bench/bench.h"
#include "kernels/elementwise/elementwise.h"

namespace tapeline::bench {
namespace {

template <class T>
Run make_add(const Arguments& a) {
  const int64_t n = a.dims[0], d = a.dims[1];
  struct Data {
    Array<T> x, z, y;
  };
  auto data = std::make_shared<Data>(
      Data{normal<T>(n * d, 1), normal<T>(n * d, 2), Array<T>(n * d)});
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
                  verifier.row(data->y.row(i * d, d), sum);
                }
              }};
}

Run make(const Arguments& a) {
  return dispatch_float(a.dtype, [&]<class T>() { return make_add<T>(a); });
}

// Masters to what is trained with: f32 to bf16.
Run make_cast(const Arguments& a) {
  const int64_t n = a.dims[0], d = a.dims[1];
  struct Data {
    Array<float> x;
    Array<bf16> y;
  };
  auto data =
      std::make_shared<Data>(Data{normal<float>(n * d, 1), Array<bf16>(n * d)});
  // Off the bf16 grid, so that something is rounded.
  const View<float> x = view_of(data->x, {n, d});
  scale<float>(a.launch, 1.001, View<const float>(x), x);
  return {.launch =
              [=, l = a.launch] {
                const Data& in = *data;
                cast(l, view_of(in.x, {n, d}), view_of(data->y, {n, d}));
              },
          .cost = {.bytes = 6.0 * n * d},
          .verify =
              [=](Verifier& verifier) {
                for (int64_t i : sampled_rows(n)) {
                  const float* row = data->x.host(i * d, d);
                  std::vector<double> rounded;
                  for (int64_t j = 0; j < d; ++j) {
                    rounded.push_back(float{bf16(row[j])});
                  }
                  verifier.row(data->y.row(i * d, d), rounded);
                }
              }};
}

const std::vector<std::string> kKeys = {"T", "H"};
const std::vector<std::vector<int64_t>> kShapes = {{1024, 128}, {4096, 1024}};
const std::vector<std::vector<int64_t>> kModels = {{16384, 7168},
                                                   {32768, 2048}};
const bool added = add({"elementwise", "add", kKeys, kShapes, make, kModels}) &&
                   add({"elementwise", "cast", kKeys, kShapes, make_cast,
                        kModels, DType::kF32},
                       {.dtypes = {DType::kF32}});

}  // namespace
}  // namespace tapeline::bench
