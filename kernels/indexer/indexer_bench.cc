// S queries that all see T keys.
#include <algorithm>
#include <cmath>
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
    begin.assign(N, 0);
    end.assign(N, static_cast<int32_t>(S));
    scores.resize(N * S);
    ids.resize(N * K);
    workspace.resize(indexer_select_workspace_bytes<T>(launch(), N, S));
  }
  KeyRange range() const { return {view_of(begin, {N}), view_of(end, {N})}; }
  double scale() const { return 1 / std::sqrt(static_cast<double>(D)); }
  void score(Launch l) {
    indexer_scores<T>(l, {q.data(), {N, H, D}}, {k.data(), {S, D}},
                      {w.data(), {N, H}}, range(), scale(),
                      view_of(scores, {N, S}));
  }
  void select(Launch l) {
    indexer_select<T>(l, {q.data(), {N, H, D}}, {k.data(), {S, D}},
                      {w.data(), {N, H}}, range(), scale(), static_cast<int>(K),
                      view_of(ids, {N, K}), workspace.data());
  }
  std::vector<double> row(int64_t t) const {
    std::vector<double> out(S);
    for (int64_t s = 0; s < S; ++s) {
      for (int64_t h = 0; h < H; ++h) {
        double dot = 0;
        for (int64_t d = 0; d < D; ++d) {
          dot += double(q[(t * H + h) * D + d]) * double(k[s * D + d]);
        }
        out[s] += double(w[t * H + h]) * std::max(dot * scale(), 0.0);
      }
    }
    return out;
  }

  int64_t H, D, N, S, K;
  std::vector<T> q, k;
  std::vector<A> w, scores;
  std::vector<int32_t> begin, end, ids;
  std::vector<std::byte> workspace;
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
      for (int64_t t : bench::sampled_rows(x.N)) {
        verifier.row(View<const Accumulator<T>>(&x.scores[t * x.S], {x.S}),
                     x.row(t), x.H * x.D);
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
      for (int64_t t : bench::sampled_rows(x.N)) {
        std::vector<double> all = x.row(t);
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

const bool added =
    bench::add({"indexer",
                "dsa_indexer_scores",
                {"heads", "d", "S", "T"},
                {{4, 32, 512, 512}, {32, 128, 64, 2048}},
                make_scores}) &&
    bench::add({"indexer",
                "dsa_indexer_select",
                {"heads", "d", "S", "T", "topk"},
                {{4, 32, 512, 512, 64}, {32, 128, 64, 2048, 256}},
                make_select});

}  // namespace
}  // namespace tapeline
