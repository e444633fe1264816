// S queries that each select `topk` of Skv keys at random.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <random>
#include <vector>

#include "kernels/bench/bench.h"
#include "kernels/sparse_attention/sparse_attention.h"

namespace tapeline {
namespace {

enum class Pass { kForward, kBackward, kBoth, kInvert };

template <class T>
struct Attention {
  Attention(const std::vector<int64_t>& dims, bool gradient)
      : H(dims[0]), N(dims[1]), S(dims[2]), K(dims[3]), D(dims[4]), V(dims[5]) {
    q = bench::normal<T>(N * H * D, 1);
    kv = bench::normal<T>(S * D, 2);
    o = bench::Array<T>(N * H * V);
    lse = bench::Array<Accumulator<T>>(N * H);
    offsets = bench::Array<int32_t>(S + 1);
    entries = bench::Array<int32_t>(N * K);
    ids.assign(N * K, -1);
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
    device_ids = bench::Array<int32_t>(ids);
    invert_space = bench::Array<std::byte>(static_cast<int64_t>(
        invert_ids_workspace_bytes(launch(), {device_ids.data(), {N, K}}, S)));
    if (!gradient) return;
    dout = bench::normal<T>(o.size(), 3);
    dq = bench::Array<T>(q.size());
    dkv = bench::Array<T>(kv.size());
    workspace = bench::Array<std::byte>(
        static_cast<int64_t>(sparse_attention_backward_workspace_bytes<T>(
            launch(), {q.data(), {N, H, D}}, {kv.data(), {S, D}},
            {device_ids.data(), {N, K}}, {o.data(), {N, H, V}}, scale())));
  }
  double scale() const { return 1 / std::sqrt(static_cast<double>(D)); }
  void run(Launch l, Pass pass) {
    const View<const T> q_view(q.data(), {N, H, D}), kv_view(kv.data(), {S, D});
    const View<const int32_t> ids_view(device_ids.data(), {N, K});
    if (pass == Pass::kInvert) {
      invert_ids(l, ids_view, view_of(offsets, {S + 1}),
                 view_of(entries, {N * K}),
                 invert_space.size() > 0 ? invert_space.data() : nullptr);
    } else if (pass == Pass::kForward) {
      sparse_attention_forward<T>(l, q_view, kv_view, ids_view, scale(),
                                  view_of(o, {N, H, V}), view_of(lse, {N, H}));
    } else if (pass == Pass::kBoth) {
      run(l, Pass::kForward);
      run(l, Pass::kInvert);
      run(l, Pass::kBackward);
    } else {
      sparse_attention_backward<T>(
          l, {dout.data(), {N, H, V}}, q_view, kv_view, ids_view,
          {o.data(), {N, H, V}}, {lse.data(), {N, H}},
          {offsets.data(), {S + 1}}, {entries.data(), {N * K}}, scale(),
          view_of(dq, {N, H, D}), view_of(dkv, {S, D}), workspace.data());
    }
  }

  // Entries of sampled keys: all pairs that name the key, ascending.
  void verify_inverse(bench::Verifier& verifier) const {
    for (int64_t s : bench::sampled_rows(S)) {
      std::vector<double> expected = {static_cast<double>(s)};
      for (int64_t e = 0; e < N * K; ++e) {
        if (ids[e] == s) expected.push_back(static_cast<double>(e));
      }
      std::vector<float> got = {static_cast<float>(s)};
      for (int64_t i = offsets[s]; i < offsets[s + 1]; ++i) {
        got.push_back(static_cast<float>(entries[i]));
      }
      // A list of another length differs in its last element.
      got.resize(expected.size(), -1);
      if (offsets[s + 1] - offsets[s] !=
          static_cast<int64_t>(expected.size()) - 1) {
        got.back() = -1;
      }
      verifier.row(
          View<const float>(got.data(), {static_cast<int64_t>(got.size())}),
          expected);
    }
  }
  // One head of one query, plainly; the gradient uses o and lse as given.
  void verify(bench::Verifier& verifier, Pass pass) const {
    for (int64_t t : bench::sampled_rows(N)) {
      const int64_t row = t * H + t % H;
      std::vector<double> score(selected), o_row(V), dq_row(D);
      double norm = 0, delta = 0;
      const T* q_row = q.host(row * D, D);
      const std::vector<T> zeros(V, T(0.0f));
      const T* g_row = dout.size() > 0 ? dout.host(row * V, V) : zeros.data();
      for (int64_t j = 0; j < selected; ++j) {
        const T* key = kv.host(ids[t * K + j] * D, D);
        for (int64_t d = 0; d < D; ++d) {
          score[j] += double(q_row[d]) * double(key[d]);
        }
        norm += std::exp(score[j] * scale());
      }
      for (int64_t i = 0; i < V; ++i) {
        delta += double(g_row[i]) * double(o[row * V + i]);
      }
      for (int64_t j = 0; j < selected; ++j) {
        const T* key = kv.host(ids[t * K + j] * D, D);
        const double p = std::exp(score[j] * scale()) / norm;
        double dp = 0;
        for (int64_t i = 0; i < V; ++i) {
          o_row[i] += p * double(key[i]);
          dp += double(g_row[i]) * double(key[i]);
        }
        for (int64_t d = 0; d < D; ++d) {
          dq_row[d] += p * (dp - delta) * scale() * double(key[d]);
        }
      }
      if (pass == Pass::kBackward || pass == Pass::kBoth) {
        verifier.row(dq.row(row * D, D), dq_row,
                     16 * (K + D) + bench::rounded_terms<T>());
      } else {
        verifier.row(o.row(row * V, V), o_row,
                     K + D + bench::rounded_terms<T>());
      }
    }
  }

  int64_t H, N, S, K, D, V, selected;
  bench::Array<T> q, kv, dout, o, dq, dkv;
  bench::Array<Accumulator<T>> lse;
  std::vector<int32_t> ids;
  bench::Array<int32_t> device_ids, offsets, entries;
  bench::Array<std::byte> workspace, invert_space;
};

template <Pass kPass>
bench::Run make(const bench::Arguments& arguments) {
  return dispatch_float(arguments.dtype, [&]<class T>() {
    const auto state = std::make_shared<Attention<T>>(
        arguments.dims, kPass == Pass::kBackward || kPass == Pass::kBoth);
    const Attention<T>& s = *state;
    const Launch l = arguments.launch;
    state->run(l, Pass::kForward);
    state->run(l, Pass::kInvert);
    bench::Run run;
    const Cost forward =
        sparse_attention_forward_cost<T>(s.N, s.H, s.D, s.V, s.selected);
    const Cost backward =
        sparse_attention_backward_cost<T>(s.N, s.H, s.D, s.V, s.selected);
    switch (kPass) {
      case Pass::kForward:
        run.cost = forward;
        break;
      case Pass::kBackward:
        run.cost = backward;
        break;
      case Pass::kBoth:
        run.cost = {forward.flops + backward.flops,
                    forward.bytes + backward.bytes};
        break;
      case Pass::kInvert:
        run.cost = {0, 4.0 * (2 * s.N * s.K + s.S)};
    }
    run.launch = [state, l] { state->run(l, kPass); };
    run.verify = [state](bench::Verifier& verifier) {
      if (kPass == Pass::kInvert) return state->verify_inverse(verifier);
      state->verify(verifier, kPass);
    };
    return run;
  });
}

const std::vector<std::string> kKeys = {"heads", "S",   "Skv",
                                        "topk",  "dqk", "dv"};
const std::vector<std::vector<int64_t>> kShapes = {{4, 512, 512, 64, 80, 64},
                                                   {4, 256, 256, 64, 96, 80}};

// GLM-5.2 and DeepSeek-V3.2.
const std::vector<std::vector<int64_t>> kModels = {
    {64, 512, 32768, 2048, 576, 512}, {128, 256, 32768, 2048, 576, 512}};

const bench::Limits kLimits = {.broken = [](const std::vector<int64_t>& d) {
  return bench::first_broken({d[5] <= d[4] ? "" : "dv is at most dqk",
                              bench::at_most(kMaxHeadDim, "dqk", d[4]),
                              bench::at_most(INT32_MAX / d[3], "S", d[1])});
}};

const bool added = bench::add({"sparse_attention", "sparse_mla_fwd", kKeys,
                               kShapes, make<Pass::kForward>, kModels},
                              kLimits) &&
                   bench::add({"sparse_attention", "sparse_mla_bwd", kKeys,
                               kShapes, make<Pass::kBackward>, kModels},
                              kLimits) &&
                   bench::add({"sparse_attention", "sparse_mla_fwdbwd", kKeys,
                               kShapes, make<Pass::kBoth>, kModels},
                              kLimits) &&
                   bench::add({"sparse_attention", "invert_ids", kKeys, kShapes,
                               make<Pass::kInvert>, kModels},
                              kLimits);

}  // namespace
}  // namespace tapeline
