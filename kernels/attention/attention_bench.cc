// Causal attention over one sequence of S tokens.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/bench/bench.h"

namespace tapeline {
namespace {

template <class T>
struct Causal {
  Causal(const std::vector<int64_t>& dims, bool gradient)
      : H(dims[0]), G(dims[1]), D(dims[2]), V(dims[3]), S(dims[4]) {
    q = bench::normal<T>(S * H * D, 1);
    k = bench::normal<T>(S * G * D, 2);
    v = bench::normal<T>(S * G * V, 3);
    o = bench::Array<T>(S * H * V);
    lse = bench::Array<Accumulator<T>>(S * H);
    const std::vector<int32_t> cu = {0, static_cast<int32_t>(S)};
    std::vector<int32_t> begins(S), ends(S);
    key_ranges_from_cu_seqlens(view_of(cu, {2}), view_of(begins, {S}),
                               view_of(ends, {S}));
    begin = bench::Array<int32_t>(begins);
    end = bench::Array<int32_t>(ends);
    if (!gradient) return;
    dout = bench::normal<T>(S * H * V, 4);
    dq = bench::Array<T>(q.size());
    dk = bench::Array<T>(k.size());
    dv = bench::Array<T>(v.size());
    const Causal& in = *this;
    workspace = bench::Array<std::byte>(
        static_cast<int64_t>(attention_backward_workspace_bytes<T>(
            launch(), view_of(in.q, {S, H, D}), view_of(in.k, {S, G, D}),
            view_of(in.v, {S, G, V}), view_of(in.o, {S, H, V}), scale())));
  }
  KeyRange range() const { return {view_of(begin, {S}), view_of(end, {S})}; }
  double scale() const { return 1 / std::sqrt(static_cast<double>(D)); }
  int64_t pairs() const { return S * (S + 1) / 2; }
  void forward(Launch l) {
    const Causal& in = *this;
    attention_forward<T>(l, view_of(in.q, {S, H, D}), view_of(in.k, {S, G, D}),
                         view_of(in.v, {S, G, V}), range(), scale(),
                         view_of(o, {S, H, V}), view_of(lse, {S, H}));
  }
  void backward(Launch l) {
    const Causal& in = *this;
    attention_backward<T>(l, view_of(in.dout, {S, H, V}),
                          view_of(in.q, {S, H, D}), view_of(in.k, {S, G, D}),
                          view_of(in.v, {S, G, V}), view_of(in.o, {S, H, V}),
                          view_of(in.lse, {S, H}), range(), scale(),
                          view_of(dq, {S, H, D}), view_of(dk, {S, G, D}),
                          view_of(dv, {S, G, V}), workspace.data());
  }

  // o and dq of (query, head) in f64; o as given enters dq, as in the contract.
  void row(int64_t t, int64_t h, std::vector<double>* o_row,
           std::vector<double>* dq_row) const {
    const int64_t g = h * G / H;
    const double norm = lse[t * H + h];
    o_row->assign(V, 0);
    dq_row->assign(D, 0);
    const T* q_row = q.host((t * H + h) * D, D);
    const T* out = o.host((t * H + h) * V, V);
    const std::vector<T> zeros(V, T(0.0f));
    const T* g_row =
        dout.size() > 0 ? dout.host((t * H + h) * V, V) : zeros.data();
    double delta = 0;
    for (int64_t i = 0; i < V; ++i) delta += double(g_row[i]) * double(out[i]);
    for (int64_t j = 0; j <= t; ++j) {
      const T* key = k.host((j * G + g) * D, D);
      const T* value = v.host((j * G + g) * V, V);
      double score = 0, dp = 0;
      for (int64_t d = 0; d < D; ++d)
        score += double(q_row[d]) * double(key[d]);
      const double p = std::exp(score * scale() - norm);
      for (int64_t i = 0; i < V; ++i) {
        (*o_row)[i] += p * double(value[i]);
        dp += double(g_row[i]) * double(value[i]);
      }
      for (int64_t d = 0; d < D; ++d) {
        (*dq_row)[d] += p * (dp - delta) * scale() * double(key[d]);
      }
    }
  }
  void verify(bench::Verifier& verifier, bool gradient) const {
    std::vector<double> o_row, dq_row;
    for (int64_t t : bench::sampled_rows(S)) {
      const int64_t h = t % H;
      row(t, h, &o_row, &dq_row);
      if (!gradient) {
        verifier.row(o.row((t * H + h) * V, V), o_row,
                     t + D + bench::rounded_terms<T>());
      } else if (t > 0) {  // the first query's dq is rounding alone
        verifier.row(dq.row((t * H + h) * D, D), dq_row,
                     16 * (t + D + V) + bench::rounded_terms<T>());
      }
    }
  }

  int64_t H, G, D, V, S;
  bench::Array<T> q, k, v, dout, o, dq, dk, dv;
  bench::Array<Accumulator<T>> lse;
  bench::Array<int32_t> begin, end;
  bench::Array<std::byte> workspace;
};

template <class T>
bench::Run make(const bench::Arguments& arguments, bool gradient) {
  const auto state = std::make_shared<Causal<T>>(arguments.dims, gradient);
  const Causal<T>& s = *state;
  const Launch l = arguments.launch;
  state->forward(l);
  bench::Run run;
  run.cost =
      gradient
          ? attention_backward_cost<T>(s.S, s.S, s.H, s.G, s.D, s.V, s.pairs())
          : attention_forward_cost<T>(s.S, s.S, s.H, s.G, s.D, s.V, s.pairs());
  run.launch = [state, l, gradient] {
    gradient ? state->backward(l) : state->forward(l);
  };
  run.verify = [state, gradient](bench::Verifier& verifier) {
    state->verify(verifier, gradient);
  };
  return run;
}

bench::Run make_forward(const bench::Arguments& arguments) {
  return dispatch_float(arguments.dtype,
                        [&]<class T>() { return make<T>(arguments, false); });
}
bench::Run make_backward(const bench::Arguments& arguments) {
  return dispatch_float(arguments.dtype,
                        [&]<class T>() { return make<T>(arguments, true); });
}

const std::vector<std::vector<int64_t>> kShapes = {
    {4, 4, 80, 64, 512}, {8, 2, 64, 64, 512}, {2, 2, 256, 256, 512}};

// Qwen3-235B, Qwen3-30B, DeepSeek-V3 and GLM-5.2.
const std::vector<std::vector<int64_t>> kModels = {{64, 4, 128, 128, 8192},
                                                   {32, 4, 128, 128, 16384},
                                                   {128, 128, 192, 128, 4096},
                                                   {64, 64, 256, 256, 8192}};
const bench::Limits kLimits = {.broken = [](const std::vector<int64_t>& d) {
  return bench::first_broken({bench::multiple("Hk", d[1], "Hq", d[0]),
                              bench::at_most(kMaxHeadDim, "dqk", d[2]),
                              bench::at_most(kMaxHeadDim, "dv", d[3])});
}};

const bool added = bench::add({"attention",
                               "sdpa_causal_fwd",
                               {"Hq", "Hk", "dqk", "dv", "S"},
                               kShapes,
                               make_forward,
                               kModels},
                              kLimits) &&
                   bench::add({"attention",
                               "sdpa_causal_bwd",
                               {"Hq", "Hk", "dqk", "dv", "S"},
                               kShapes,
                               make_backward,
                               kModels},
                              kLimits);

}  // namespace
}  // namespace tapeline
