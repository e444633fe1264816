// Causal attention over one sequence of S tokens.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/bench/bench.h"

namespace tapeline {
namespace {

template <class T>
struct Causal {
  Causal(const std::vector<int64_t>& dims)
      : H(dims[0]), G(dims[1]), D(dims[2]), V(dims[3]), S(dims[4]) {
    q = bench::normal<T>(S * H * D, 1);
    k = bench::normal<T>(S * G * D, 2);
    v = bench::normal<T>(S * G * V, 3);
    dout = bench::normal<T>(S * H * V, 4);
    o.resize(S * H * V);
    lse.resize(S * H);
    dq.resize(q.size());
    dk.resize(k.size());
    dv.resize(v.size());
    const std::vector<int32_t> cu = {0, static_cast<int32_t>(S)};
    begin.resize(S);
    end.resize(S);
    key_ranges_from_cu_seqlens(view_of(cu, {2}), view_of(begin, {S}),
                               view_of(end, {S}));
  }
  KeyRange range() const { return {view_of(begin, {S}), view_of(end, {S})}; }
  double scale() const { return 1 / std::sqrt(static_cast<double>(D)); }
  int64_t pairs() const { return S * (S + 1) / 2; }
  void forward(Launch l) {
    attention_forward<T>(l, view_of(q, {S, H, D}), view_of(k, {S, G, D}),
                         view_of(v, {S, G, V}), range(), scale(),
                         view_of(o, {S, H, V}), view_of(lse, {S, H}));
  }
  void backward(Launch l) {
    attention_backward<T>(
        l, view_of(dout, {S, H, V}), view_of(q, {S, H, D}),
        view_of(k, {S, G, D}), view_of(v, {S, G, V}), view_of(o, {S, H, V}),
        view_of(lse, {S, H}), range(), scale(), view_of(dq, {S, H, D}),
        view_of(dk, {S, G, D}), view_of(dv, {S, G, V}), nullptr);
  }

  // o and dq of (query, head) in f64; o as given enters dq, as in the contract.
  void row(int64_t t, int64_t h, std::vector<double>* o_row,
           std::vector<double>* dq_row) const {
    const int64_t g = h * G / H;
    const double norm = lse[t * H + h];
    o_row->assign(V, 0);
    dq_row->assign(D, 0);
    double delta = 0;
    for (int64_t i = 0; i < V; ++i) {
      const int64_t at = (t * H + h) * V + i;
      delta += double(dout[at]) * double(o[at]);
    }
    for (int64_t j = 0; j <= t; ++j) {
      double score = 0, dp = 0;
      for (int64_t d = 0; d < D; ++d) {
        score +=
            double(q[(t * H + h) * D + d]) * double(k[(j * G + g) * D + d]);
      }
      const double p = std::exp(score * scale() - norm);
      for (int64_t i = 0; i < V; ++i) {
        const double x = v[(j * G + g) * V + i];
        (*o_row)[i] += p * x;
        dp += double(dout[(t * H + h) * V + i]) * x;
      }
      for (int64_t d = 0; d < D; ++d) {
        (*dq_row)[d] +=
            p * (dp - delta) * scale() * double(k[(j * G + g) * D + d]);
      }
    }
  }
  void verify(bench::Verifier& verifier, bool gradient) const {
    std::vector<double> o_row, dq_row;
    for (int64_t t : bench::sampled_rows(S)) {
      const int64_t h = t % H;
      row(t, h, &o_row, &dq_row);
      if (!gradient) {
        verifier.row(View<const T>(&o[(t * H + h) * V], {V}), o_row, t + D);
      } else if (t > 0) {  // the first query's dq is rounding alone
        verifier.row(View<const T>(&dq[(t * H + h) * D], {D}), dq_row,
                     16 * (t + D + V));
      }
    }
  }

  int64_t H, G, D, V, S;
  std::vector<T> q, k, v, dout, o, dq, dk, dv;
  std::vector<Accumulator<T>> lse;
  std::vector<int32_t> begin, end;
};

template <class T>
bench::Run make(const bench::Arguments& arguments, bool gradient) {
  const auto state = std::make_shared<Causal<T>>(arguments.dims);
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

const bool added = bench::add({"attention",
                               "sdpa_causal_fwd",
                               {"Hq", "Hk", "dqk", "dv", "S"},
                               kShapes,
                               make_forward}) &&
                   bench::add({"attention",
                               "sdpa_causal_bwd",
                               {"Hq", "Hk", "dqk", "dv", "S"},
                               kShapes,
                               make_backward});

}  // namespace
}  // namespace tapeline
