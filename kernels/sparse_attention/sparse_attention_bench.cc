// S queries that each select `topk` of Skv keys at random.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "kernels/bench/bench.h"
#include "kernels/sparse_attention/sparse_attention.h"

namespace tapeline {
namespace {

enum class Pass { kForward, kBackward, kInvert };

template <class T>
struct Attention {
  explicit Attention(const std::vector<int64_t>& dims)
      : H(dims[0]), N(dims[1]), S(dims[2]), K(dims[3]), D(dims[4]), V(dims[5]) {
    q = bench::normal<T>(N * H * D, 1);
    kv = bench::normal<T>(S * D, 2);
    dout = bench::normal<T>(N * H * V, 3);
    o.resize(dout.size());
    dq.resize(q.size());
    dkv.resize(kv.size());
    lse.resize(N * H);
    ids.assign(N * K, -1);
    offsets.resize(S + 1);
    entries.resize(N * K);
    workspace.resize(sparse_attention_backward_workspace_bytes<T>(
        launch(), {q.data(), {N, H, D}}, {kv.data(), {S, D}},
        {ids.data(), {N, K}}, {o.data(), {N, H, V}}, scale()));
    std::mt19937 engine(4);
    std::vector<int32_t> keys(S);
    for (int64_t s = 0; s < S; ++s) keys[s] = static_cast<int32_t>(s);
    selected = std::min(K, S);
    for (int64_t t = 0; t < N; ++t) {
      for (int64_t j = 0; j < selected; ++j) {
        std::swap(keys[j], keys[j + engine() % (S - j)]);
        ids[t * K + j] = keys[j];
      }
      std::sort(ids.begin() + t * K, ids.begin() + t * K + selected);
    }
  }
  double scale() const { return 1 / std::sqrt(static_cast<double>(D)); }
  void run(Launch l, Pass pass) {
    const View<const T> q_view(q.data(), {N, H, D}), kv_view(kv.data(), {S, D});
    const View<const int32_t> ids_view(ids.data(), {N, K});
    if (pass == Pass::kInvert) {
      invert_ids(l, ids_view, view_of(offsets, {S + 1}),
                 view_of(entries, {N * K}));
    } else if (pass == Pass::kForward) {
      sparse_attention_forward<T>(l, q_view, kv_view, ids_view, scale(),
                                  view_of(o, {N, H, V}), view_of(lse, {N, H}));
    } else {
      sparse_attention_backward<T>(
          l, {dout.data(), {N, H, V}}, q_view, kv_view, ids_view,
          {o.data(), {N, H, V}}, {lse.data(), {N, H}},
          {offsets.data(), {S + 1}}, {entries.data(), {N * K}}, scale(),
          view_of(dq, {N, H, D}), view_of(dkv, {S, D}), workspace.data());
    }
  }

  // One head of one query, plainly; the gradient uses o and lse as given.
  void verify(bench::Verifier& verifier, Pass pass) const {
    for (int64_t t : bench::sampled_rows(N)) {
      const int64_t row = t * H + t % H;
      std::vector<double> score(selected), o_row(V), dq_row(D);
      double norm = 0, delta = 0;
      for (int64_t j = 0; j < selected; ++j) {
        for (int64_t d = 0; d < D; ++d) {
          score[j] +=
              double(q[row * D + d]) * double(kv[ids[t * K + j] * D + d]);
        }
        norm += std::exp(score[j] * scale());
      }
      for (int64_t i = 0; i < V; ++i) {
        delta += double(dout[row * V + i]) * double(o[row * V + i]);
      }
      for (int64_t j = 0; j < selected; ++j) {
        const T* key = &kv[ids[t * K + j] * D];
        const double p = std::exp(score[j] * scale()) / norm;
        double dp = 0;
        for (int64_t i = 0; i < V; ++i) {
          o_row[i] += p * double(key[i]);
          dp += double(dout[row * V + i]) * double(key[i]);
        }
        for (int64_t d = 0; d < D; ++d) {
          dq_row[d] += p * (dp - delta) * scale() * double(key[d]);
        }
      }
      if (pass == Pass::kBackward) {
        verifier.row(View<const T>(&dq[row * D], {D}), dq_row, 16 * (K + D));
      } else {
        verifier.row(View<const T>(&o[row * V], {V}), o_row, K + D);
      }
    }
  }

  int64_t H, N, S, K, D, V, selected;
  std::vector<T> q, kv, dout, o, dq, dkv;
  std::vector<Accumulator<T>> lse;
  std::vector<int32_t> ids, offsets, entries;
  std::vector<std::byte> workspace;
};

template <Pass kPass>
bench::Run make(const bench::Arguments& arguments) {
  return dispatch_float(arguments.dtype, [&]<class T>() {
    const auto state = std::make_shared<Attention<T>>(arguments.dims);
    const Attention<T>& s = *state;
    const Launch l = arguments.launch;
    state->run(l, Pass::kForward);
    state->run(l, Pass::kInvert);
    bench::Run run;
    switch (kPass) {
      case Pass::kForward:
        run.cost =
            sparse_attention_forward_cost<T>(s.N, s.H, s.D, s.V, s.selected);
        break;
      case Pass::kBackward:
        run.cost =
            sparse_attention_backward_cost<T>(s.N, s.H, s.D, s.V, s.selected);
        break;
      case Pass::kInvert:
        run.cost = {0, 4.0 * (2 * s.N * s.K + s.S)};
    }
    run.launch = [state, l] { state->run(l, kPass); };
    run.verify = [state](bench::Verifier& verifier) {
      state->verify(verifier, kPass);
    };
    return run;
  });
}

const std::vector<std::string> kKeys = {"heads", "S",   "Skv",
                                        "topk",  "dqk", "dv"};
const std::vector<std::vector<int64_t>> kShapes = {{4, 512, 512, 64, 80, 64},
                                                   {4, 256, 256, 64, 96, 80}};

const bool added = bench::add({"sparse_attention", "sparse_mla_fwd", kKeys,
                               kShapes, make<Pass::kForward>}) &&
                   bench::add({"sparse_attention", "sparse_mla_bwd", kKeys,
                               kShapes, make<Pass::kBackward>}) &&
                   bench::add({"sparse_attention", "invert_ids", kKeys, kShapes,
                               make<Pass::kInvert>});

}  // namespace
}  // namespace tapeline
