// S queries that all see T keys.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <vector>

#include "kernels/bench/bench.h"
#include "kernels/indexer/indexer.h"
#include "kernels/top_k/top_k.h"

namespace tapeline {
namespace {

template <class T>
struct Indexer {
  using A = Accumulator<T>;
  explicit Indexer(const std::vector<int64_t>& dims)
      : H(dims[0]), D(dims[1]), N(dims[2]), S(dims[3]), K(dims[4]) {
    q = bench::normal<T>(N * H * D, 1);
    k = bench::normal<T>(S * D, 2);
    w = bench::normal<A>(N * H, 3);
    begin = bench::Array<int32_t>(N);
    end =
        bench::Array<int32_t>(std::vector<int32_t>(N, static_cast<int32_t>(S)));
    if (K == 0) {
      scores = bench::Array<A>(N * S);
    } else {
      ids = bench::Array<int32_t>(N * K);
      workspace = bench::Array<std::byte>(static_cast<int64_t>(
          indexer_select_workspace_bytes<T>(launch(), N, S)));
    }
  }
  KeyRange range() const { return {view_of(begin, {N}), view_of(end, {N})}; }
  double scale() const { return 1 / std::sqrt(static_cast<double>(D)); }
  void score(Launch l) {
    const Indexer& in = *this;
    indexer_scores<T>(l, view_of(in.q, {N, H, D}), view_of(in.k, {S, D}),
                      view_of(in.w, {N, H}), range(), scale(),
                      view_of(scores, {N, S}));
  }
  void select(Launch l) {
    const Indexer& in = *this;
    indexer_select<T>(l, view_of(in.q, {N, H, D}), view_of(in.k, {S, D}),
                      view_of(in.w, {N, H}), range(), scale(),
                      static_cast<int>(K), view_of(ids, {N, K}),
                      workspace.data());
  }
  // Scores of query t and these keys.
  std::vector<double> row(int64_t t, const std::vector<int64_t>& keys) const {
    const T* q_row = q.host(t * H * D, H * D);
    const A* w_row = w.host(t * H, H);
    std::vector<double> out;
    for (int64_t s : keys) {
      const T* key = k.host(s * D, D);
      double score = 0;
      for (int64_t h = 0; h < H; ++h) {
        A dot = 0;
        for (int64_t d = 0; d < D; ++d) dot += A(q_row[h * D + d]) * A(key[d]);
        score += double(w_row[h]) * std::max(double(dot) * scale(), 0.0);
      }
      out.push_back(score);
    }
    return out;
  }

  int64_t H, D, N, S, K;
  bench::Array<T> q, k;
  bench::Array<A> w, scores;
  bench::Array<int32_t> begin, end, ids;
  bench::Array<std::byte> workspace;
};

bench::Run make_scores(const bench::Arguments& arguments) {
  return dispatch_float(arguments.dtype, [&]<class T>() {
    std::vector<int64_t> dims = arguments.dims;
    dims.push_back(0);
    const auto state = std::make_shared<Indexer<T>>(dims);
    const Indexer<T>& s = *state;
    bench::Run run;
    run.cost = indexer_scores_cost<T>(s.N, s.S, s.H, s.D, s.N * s.S);
    run.launch = [state, l = arguments.launch] { state->score(l); };
    run.verify = [state](bench::Verifier& verifier) {
      const Indexer<T>& x = *state;
      const std::vector<int64_t> keys = bench::sampled_rows(x.S, 2048);
      const Shape shape{static_cast<int64_t>(keys.size())};
      for (int64_t t : bench::sampled_rows(x.N)) {
        const auto got = bench::at_columns(x.scores, t, x.S, keys);
        verifier.row(view_of(got, shape), x.row(t, keys), x.H * x.D);
      }
    };
    return run;
  });
}

// The scores in f64 of the ids chosen, in descending order, against the largest
// scores: keys whose scores are equal in the dtype may be exchanged.
bench::Run make_select(const bench::Arguments& arguments) {
  return dispatch_float(arguments.dtype, [&]<class T>() {
    const auto state = std::make_shared<Indexer<T>>(arguments.dims);
    const Indexer<T>& s = *state;
    bench::Run run;
    run.cost = indexer_select_cost<T>(s.N, s.S, s.H, s.D, s.N * s.S, s.K);
    run.launch = [state, l = arguments.launch] { state->select(l); };
    run.verify = [state](bench::Verifier& verifier) {
      const Indexer<T>& x = *state;
      const int64_t n = std::min(x.K, x.S);
      const std::vector<int64_t> keys = bench::sampled_rows(x.S, x.S);
      for (int64_t t : bench::sampled_rows(x.N, x.S > 8192 ? 2 : 8)) {
        std::vector<double> all = x.row(t, keys);
        std::vector<float> chosen;
        for (int64_t j = 0; j < n; ++j) {
          chosen.push_back(static_cast<float>(all[x.ids[t * x.K + j]]));
        }
        std::sort(chosen.rbegin(), chosen.rend());
        std::sort(all.rbegin(), all.rend());
        all.resize(n);
        verifier.row(View<const float>(chosen.data(), {n}), all, x.H * x.D);
      }
    };
    return run;
  });
}

const bench::Limits kLimits = {.broken = [](const std::vector<int64_t>& d) {
  return bench::first_broken(
      {bench::at_most(kMaxHeadDim, "d", d[1]),
       bench::at_most(INT32_MAX, "T", d[3]),
       d.size() < 5 ? "" : bench::at_most(INT32_MAX, "topk", d[4])});
}};

const bool added =
    bench::add({"indexer",
                "dsa_indexer_scores",
                {"heads", "d", "S", "T"},
                {{4, 32, 512, 512}, {32, 128, 64, 2048}},
                make_scores,
                {{32, 128, 1024, 65536}, {64, 128, 1024, 65536}}},
               kLimits) &&
    bench::add({"indexer",
                "dsa_indexer_select",
                {"heads", "d", "S", "T", "topk"},
                {{4, 32, 512, 512, 64}, {32, 128, 64, 2048, 256}},
                make_select,
                {{32, 128, 1024, 65536, 2048}, {64, 128, 1024, 65536, 2048}}},
               kLimits);

}  // namespace
}  // namespace tapeline
