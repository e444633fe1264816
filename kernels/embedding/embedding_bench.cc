#include <cstddef>
#include <memory>
#include <set>
#include <vector>

#include "kernels/bench/bench.h"
#include "kernels/embedding/embedding.h"

namespace tapeline::bench {
namespace {

template <class T>
struct Data {
  explicit Data(const Arguments& a)
      : t(a.dims[0]),
        v(a.dims[1]),
        d(a.dims[2]),
        ids(t),
        table(normal<T>(v * d, 1)),
        dy(normal<T>(t * d, 2)),
        y(t * d),
        dtable(v * d) {
    for (int64_t i = 0; i < t; ++i) {
      ids[i] = static_cast<int32_t>(i * 7919 % v);
    }
    device_ids = Array<int32_t>(ids);
  }

  int64_t t, v, d;
  std::vector<int32_t> ids;
  Array<int32_t> device_ids;
  Array<T> table, dy, y;
  Array<Accumulator<T>> dtable;
};

template <class T>
Run make_forward(const Arguments& a) {
  auto data = std::make_shared<Data<T>>(a);
  return {.launch =
              [data, l = a.launch] {
                const Data<T>& in = *data;
                embedding_forward(l, view_of(in.device_ids, {in.t}),
                                  view_of(in.table, {in.v, in.d}),
                                  view_of(data->y, {in.t, in.d}));
              },
          .cost = {.flops = 0, .bytes = 2.0 * data->t * data->d * sizeof(T)},
          .verify =
              [data](Verifier& verifier) {
                const int64_t d = data->d;
                for (int64_t i : sampled_rows(data->t)) {
                  std::vector<double> row;
                  for (int64_t j = 0; j < d; ++j) {
                    row.push_back(double(data->table[data->ids[i] * d + j]));
                  }
                  verifier.row(data->y.row(i * d, d), row);
                }
              }};
}

// The op alone: a table of zeros is fill()'s to make. The table's rows grow
// with each launch; those that tokens name are read and written.
template <class T>
Run make_backward(const Arguments& a) {
  using A = Accumulator<T>;
  auto data = std::make_shared<Data<T>>(a);
  auto space = std::make_shared<Array<std::byte>>(static_cast<int64_t>(
      embedding_backward_workspace_bytes(a.launch, data->t, data->v)));
  const std::set<int32_t> named(data->ids.begin(), data->ids.end());
  const auto rows = static_cast<double>(named.size());
  const auto launch = [=, l = a.launch] {
    const Data<T>& in = *data;
    embedding_backward(l, view_of(in.device_ids, {in.t}),
                       view_of(in.dy, {in.t, in.d}),
                       view_of(data->dtable, {in.v, in.d}), -1,
                       space->size() > 0 ? space->data() : nullptr);
  };
  return {.launch = launch,
          .cost = {.flops = 1.0 * data->t * data->d,
                   .bytes = 1.0 * data->d *
                            (data->t * sizeof(T) + 2 * rows * sizeof(A))},
          .verify = [=](Verifier& verifier) {
            launch_from_zeros(launch, data->dtable);
            const int64_t d = data->d;
            for (int64_t i : sampled_rows(data->t)) {
              std::vector<double> row(d);
              for (int64_t t = 0; t < data->t; ++t) {
                if (data->ids[t] != data->ids[i]) continue;
                for (int64_t j = 0; j < d; ++j) {
                  row[j] += kSums * double(data->dy[t * d + j]);
                }
              }
              verifier.row(data->dtable.row(data->ids[i] * d, d), row,
                           kSums * (data->t / data->v + 1));
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

const std::vector<std::vector<int64_t>> kShapes = {{1024, 256, 128},
                                                   {4096, 32768, 512}};
const std::vector<std::vector<int64_t>> kModels = {{16384, 151936, 2048},
                                                   {8192, 154880, 6144}};
const std::vector<std::string> kKeys = {"T", "V", "H"};
const bool added =
    add({"embedding", "embedding_fwd", kKeys, kShapes, forward, kModels}) &&
    add({"embedding", "embedding_bwd", kKeys, kShapes, backward, kModels});

}  // namespace
}  // namespace tapeline::bench
