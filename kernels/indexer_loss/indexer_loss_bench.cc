// S queries that each select `topk` of S keys at random.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "kernels/bench/bench.h"
#include "kernels/indexer_loss/indexer_loss.h"
#include "kernels/sparse_attention/sparse_attention.h"

namespace tapeline {
namespace {

template <class T>
struct Loss {
  using A = Accumulator<T>;
  Loss(const std::vector<int64_t>& dims, Launch l)
      : Hi(dims[0]),
        Di(dims[1]),
        H(dims[2]),
        D(dims[3]),
        S(dims[4]),
        K(std::min(dims[5], dims[4])) {
    qi = bench::normal<T>(S * Hi * Di, 1);
    ki = bench::normal<T>(S * Di, 2);
    q = bench::normal<T>(S * H * D, 3);
    kv = bench::normal<T>(S * D, 4);
    w = bench::normal<A>(S * Hi, 5);
    o = bench::Array<T>(q.size());
    dqi = bench::Array<T>(qi.size());
    dki = bench::Array<T>(ki.size());
    lse = bench::Array<A>(S * H);
    loss = bench::Array<A>(S);
    dscore = bench::Array<A>(S * K);
    dw = bench::Array<A>(w.size());
    one = bench::Array<A>(std::vector<A>{1});
    ids.resize(S * K);
    offsets = bench::Array<int32_t>(S + 1);
    entries = bench::Array<int32_t>(S * K);
    std::mt19937 engine(6);
    std::vector<int32_t> keys(S);
    for (int64_t s = 0; s < S; ++s) keys[s] = static_cast<int32_t>(s);
    for (int64_t t = 0; t < S; ++t) {
      for (int64_t j = 0; j < K; ++j) {
        std::swap(keys[j], keys[j + engine() % (S - j)]);
        ids[t * K + j] = keys[j];
      }
    }
    device_ids = bench::Array<int32_t>(ids);
    sparse_attention_forward<T>(l, {q.data(), {S, H, D}}, {kv.data(), {S, D}},
                                {device_ids.data(), {S, K}}, scale(D),
                                view_of(o, {S, H, D}), view_of(lse, {S, H}));
    invert_ids(l, {device_ids.data(), {S, K}}, view_of(offsets, {S + 1}),
               view_of(entries, {S * K}));
    workspace = bench::Array<std::byte>(
        static_cast<int64_t>(indexer_loss_backward_workspace_bytes<T>(
            l, {qi.data(), {S, Hi, Di}}, {ki.data(), {S, Di}},
            {device_ids.data(), {S, K}}, scale(Di))));
    forward(l);
  }
  static double scale(int64_t d) {
    return 1 / std::sqrt(static_cast<double>(d));
  }
  void forward(Launch l) {
    indexer_loss_forward<T>(
        l, {qi.data(), {S, Hi, Di}}, {ki.data(), {S, Di}}, {w.data(), {S, Hi}},
        scale(Di), {q.data(), {S, H, D}}, {kv.data(), {S, D}},
        {lse.data(), {S, H}}, scale(D), {device_ids.data(), {S, K}},
        view_of(loss, {S}), view_of(dscore, {S, K}));
  }
  void backward(Launch l) {
    indexer_loss_backward<T>(
        l, {dscore.data(), {S, K}}, {one.data(), {S}, {0}},
        {qi.data(), {S, Hi, Di}}, {ki.data(), {S, Di}}, {w.data(), {S, Hi}},
        scale(Di), {device_ids.data(), {S, K}}, {offsets.data(), {S + 1}},
        {entries.data(), {S * K}}, view_of(dqi, {S, Hi, Di}),
        view_of(dki, {S, Di}), view_of(dw, {S, Hi}), workspace.data());
  }

  // dscore and, given it, dq of head 0 of a query, plainly.
  void verify(bench::Verifier& verifier, bool gradient) const {
    for (int64_t t : bench::sampled_rows(S)) {
      std::vector<double> expected(K), target(K), x0(K), dq(Di);
      double total = 0, mass = 0;
      for (int64_t j = 0; j < K; ++j) {
        const int64_t id = ids[t * K + j];
        for (int64_t h = 0; h < Hi; ++h) {
          double dot = 0;
          for (int64_t d = 0; d < Di; ++d) {
            dot += double(qi[(t * Hi + h) * Di + d]) * double(ki[id * Di + d]);
          }
          if (h == 0) x0[j] = dot;
          expected[j] += double(w[t * Hi + h]) * std::max(dot * scale(Di), 0.0);
        }
        for (int64_t h = 0; h < H; ++h) {
          double dot = 0;
          for (int64_t d = 0; d < D; ++d) {
            dot += double(q[(t * H + h) * D + d]) * double(kv[id * D + d]);
          }
          target[j] += std::exp(dot * scale(D) - double(lse[t * H + h]));
        }
        total += std::exp(expected[j]);
        mass += target[j];
      }
      for (int64_t j = 0; j < K; ++j) {
        expected[j] = std::exp(expected[j]) / total - target[j] / mass;
        if (x0[j] <= 0) continue;
        const double ds = double(dscore[t * K + j]) * double(w[t * Hi]);
        for (int64_t d = 0; d < Di; ++d) {
          dq[d] += ds * scale(Di) * double(ki[ids[t * K + j] * Di + d]);
        }
      }
      const int64_t terms = 16 * (K + D);
      if (gradient) {
        verifier.row(dqi.row(t * Hi * Di, Di), dq, terms);
      } else {
        verifier.row(dscore.row(t * K, K), expected, terms);
      }
    }
  }

  int64_t Hi, Di, H, D, S, K;
  bench::Array<T> qi, ki, q, kv, o, dqi, dki;
  bench::Array<A> w, lse, loss, dscore, dw, one;
  std::vector<int32_t> ids;
  bench::Array<int32_t> device_ids, offsets, entries;
  bench::Array<std::byte> workspace;
};

template <bool kGradient>
bench::Run make(const bench::Arguments& arguments) {
  return dispatch_float(arguments.dtype, [&]<class T>() {
    const Launch l = arguments.launch;
    const auto state = std::make_shared<Loss<T>>(arguments.dims, l);
    const Loss<T>& s = *state;
    bench::Run run;
    run.cost = kGradient ? indexer_loss_backward_cost<T>(s.S, s.Hi, s.Di, s.K)
                         : indexer_loss_forward_cost<T>(s.S, s.Hi, s.Di, s.H,
                                                        s.D, s.K);
    run.launch = [state, l] {
      kGradient ? state->backward(l) : state->forward(l);
    };
    run.verify = [state](bench::Verifier& verifier) {
      state->verify(verifier, kGradient);
    };
    return run;
  });
}

const std::vector<std::string> kKeys = {"index_heads", "index_d", "heads",
                                        "dqk",         "S",       "topk"};
const std::vector<std::vector<int64_t>> kShapes = {{4, 32, 4, 80, 512, 64}};

// GLM-5.2.
const std::vector<std::vector<int64_t>> kModels = {
    {32, 128, 64, 576, 2048, 1024}};

const bench::Limits kLimits = {.broken = [](const std::vector<int64_t>& d) {
  return bench::first_broken(
      {bench::at_most(kMaxHeadDim, "index_d", d[1]),
       bench::at_most(kMaxHeadDim, "dqk", d[3]),
       // A query has at most all keys.
       bench::at_most(kMaxSelected, "topk", std::min(d[5], d[4])),
       bench::at_most(INT32_MAX / std::min(d[5], d[4]), "S", d[4])});
}};

const bool added = bench::add({"indexer_loss", "dsa_indexer_loss_fwd", kKeys,
                               kShapes, make<false>, kModels},
                              kLimits) &&
                   bench::add({"indexer_loss", "dsa_indexer_loss_bwd", kKeys,
                               kShapes, make<true>, kModels},
                              kLimits);

}  // namespace
}  // namespace tapeline
