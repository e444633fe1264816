#include <cstddef>
#include <memory>
#include <random>

#include "kernels/bench/bench.h"
#include "kernels/route/route.h"

namespace tapeline::bench {
namespace {

Run make(const Arguments& a) {
  const int64_t tokens = a.dims[0], experts = a.dims[1], top_k = a.dims[2];
  const int64_t rows = tokens * top_k;
  struct Data {
    std::vector<int32_t> ids;
    Array<int32_t> device_ids, offsets, row, token, slot;
    Array<std::byte> space;
  };
  std::vector<int32_t> ids;
  std::mt19937 random(1);
  for (int64_t i = 0; i < rows; ++i) {
    ids.push_back(static_cast<int32_t>(random() % experts));
  }
  auto data = std::make_shared<Data>(
      Data{ids, Array<int32_t>(ids), Array<int32_t>(experts + 1),
           Array<int32_t>(rows), Array<int32_t>(rows), Array<int32_t>(rows),
           Array<std::byte>(static_cast<int64_t>(
               route_workspace_bytes(a.launch, tokens, top_k, experts)))});
  return {.launch =
              [=, l = a.launch] {
                const Data& in = *data;
                route(l, view_of(in.device_ids, {tokens, top_k}),
                      view_of(data->offsets, {experts + 1}),
                      view_of(data->row, {tokens, top_k}),
                      view_of(data->token, {rows}), view_of(data->slot, {rows}),
                      in.space.size() > 0 ? data->space.data() : nullptr);
              },
          .cost = {.bytes = 16.0 * static_cast<double>(rows)},
          .verify =
              [=](Verifier& verifier) {
                // A pair's row is the number of pairs that come before it, and
                // what the row says of itself is the pair.
                for (int64_t i : sampled_rows(rows)) {
                  double before = 0;
                  for (int64_t j = 0; j < rows; ++j) {
                    before += data->ids[j] < data->ids[i] ||
                              (data->ids[j] == data->ids[i] && j < i);
                  }
                  const int64_t r = data->row[i];
                  const double got[] = {static_cast<double>(r),
                                        static_cast<double>(data->token[r]),
                                        static_cast<double>(data->slot[r])};
                  verifier.row(View<const double>(got, Shape{3}),
                               {before, static_cast<double>(i / top_k),
                                static_cast<double>(i % top_k)});
                }
              }};
}

// Of no dtype: all are int32.
const Limits kLimits = {
    .dtypes = {}, .broken = [](const std::vector<int64_t>& d) {
      return first_broken({at_most(kMaxRoutedExperts, "E", d[1]),
                           at_most(INT32_MAX / d[2], "T", d[0])});
    }};

const bool added = add({"route",
                        "route_sort_index",
                        {"T", "E", "k"},
                        {{1024, 8, 2}, {16384, 256, 8}},
                        make,
                        {{16384, 256, 8}},
                        DType::kF32},
                       kLimits);

}  // namespace
}  // namespace tapeline::bench
