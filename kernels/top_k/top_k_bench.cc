// Rows of ReLU scores as the indexer makes them.
#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/bench/bench.h"
#include "kernels/top_k/top_k.h"

namespace tapeline {
namespace {

template <class S>
bench::Run make_of(const bench::Arguments& arguments) {
  struct State {
    bench::Array<S> scores;
    bench::Array<int32_t> ids;
  };
  const int64_t rows = arguments.dims[0], keys = arguments.dims[1],
                k = arguments.dims[2];
  const auto state = std::make_shared<State>();
  state->scores = bench::normal<S>(rows * keys, 1);
  state->ids = bench::Array<int32_t>(rows * k);
  bench::Run run;
  run.cost = {0, static_cast<double>(rows) * (keys * sizeof(S) + 4 * k)};
  run.launch = [=, l = arguments.launch] {
    const State& in = *state;
    top_k<S>(l, view_of(in.scores, {rows, keys}), {}, static_cast<int>(k),
             view_of(state->ids, {rows, k}));
  };
  run.verify = [=](bench::Verifier& verifier) {
    for (int64_t i : bench::sampled_rows(rows)) {
      const S* x = state->scores.host(i * keys, keys);
      std::vector<int32_t> order(keys);
      for (int64_t s = 0; s < keys; ++s) order[s] = static_cast<int32_t>(s);
      std::stable_sort(order.begin(), order.end(),
                       [x](int32_t a, int32_t b) { return x[a] > x[b]; });
      order.resize(std::min(k, keys));
      std::sort(order.begin(), order.end());
      order.resize(k, -1);
      std::vector<float> got;
      for (int64_t j = 0; j < k; ++j) {
        got.push_back(static_cast<float>(state->ids[i * k + j]));
      }
      verifier.row(View<const float>(got.data(), {k}),
                   std::vector<double>(order.begin(), order.end()));
    }
  };
  return run;
}

bench::Run make(const bench::Arguments& arguments) {
  return arguments.dtype == DType::kF64 ? make_of<double>(arguments)
                                        : make_of<float>(arguments);
}

const bool added = bench::add(
    {"top_k",
     "dsa_topk",
     {"rows", "T", "k"},
     {{512, 512, 64}, {64, 32768, 2048}},
     make,
     {{1024, 32768, 2048}, {1024, 131072, 2048}},
     DType::kF32},
    {.dtypes = {DType::kF32, DType::kF64},
     .broken = [](const std::vector<int64_t>& d) {
       return bench::first_broken({bench::at_most(INT32_MAX, "T", d[1]),
                                   bench::at_most(INT32_MAX, "k", d[2])});
     }});

}  // namespace
}  // namespace tapeline
