// A feed-forward layer of experts, whole: router, route, dispatch, the two
// grouped products with SwiGLU between them, combine; and every gradient, those
// of the weights in fp32. Router logits are an input, as in the baseline.
#include <cmath>
#include <cstddef>
#include <memory>
#include <vector>

#include "kernels/bench/bench.h"
#include "kernels/combine/combine.h"
#include "kernels/dispatch/dispatch.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/grouped_matmul/grouped_matmul.h"
#include "kernels/route/route.h"
#include "kernels/router/router.h"
#include "kernels/swiglu/swiglu.h"

namespace tapeline::bench {
namespace {

// T tokens choose K of E experts; width D, F inside an expert, R = T K rows.
template <class T>
struct Layer {
  using A = Accumulator<T>;

  Layer(const Arguments& a, bool gradient)
      : N(a.dims[0]), K(a.dims[1]), E(a.dims[2]), D(a.dims[3]), F(a.dims[4]) {
    R = N * K;
    options = {.score = RouterOptions::kSoftmax, .top_k = static_cast<int>(K)};
    x = normal<T>(N * D, 1);
    logits = normal<A>(N * E, 2);
    up = weight(a.launch, 2 * F, D, 3);
    down = weight(a.launch, D, F, 4);
    ids = Array<int32_t>(R);
    offsets = Array<int32_t>(E + 1);
    row = Array<int32_t>(R);
    token = Array<int32_t>(R);
    slot = Array<int32_t>(R);
    route_space = Array<std::byte>(
        static_cast<int64_t>(route_workspace_bytes(a.launch, N, K, E)));
    w = Array<A>(R);
    x_R = Array<T>(R * D);
    h = Array<T>(R * 2 * F);
    act = Array<T>(R * F);
    y_R = Array<T>(R * D);
    y = Array<T>(N * D);
    if (!gradient) return;
    dy = normal<T>(N * D, 5);
    dw = Array<A>(R);
    dlogits = Array<A>(N * E);
    dy_R = Array<T>(R * D);
    dact = Array<T>(R * F);
    dh = Array<T>(R * 2 * F);
    dx_R = Array<T>(R * D);
    dx = Array<T>(N * D);
    dup = Array<A>(up.size());
    ddown = Array<A>(down.size());
  }
  // [E, rows, columns], so that products keep the size of their input.
  Array<T> weight(Launch l, int64_t rows, int64_t columns, uint32_t seed) {
    Array<T> out = normal<T>(E * rows * columns, seed);
    const View<T> values = view_of(out, {E * rows * columns});
    scale<T>(l, 1 / std::sqrt(static_cast<double>(columns)),
             View<const T>(values), values);
    return out;
  }

  void forward(Launch l) {
    const Layer& in = *this;
    const View<const A> logits_NE = view_of(in.logits, {N, E});
    router_choose<A>(l, logits_NE, {}, options, view_of(ids, {N, K}));
    router_weights<A>(l, logits_NE, view_of(in.ids, {N, K}), options,
                      view_of(w, {N, K}));
    route(l, view_of(in.ids, {N, K}), view_of(offsets, {E + 1}),
          view_of(row, {N, K}), view_of(token, {R}), view_of(slot, {R}),
          route_space.size() > 0 ? route_space.data() : nullptr);
    dispatch_forward<T>(l, view_of(in.x, {N, D}), view_of(in.row, {N, K}),
                        view_of(x_R, {R, D}));
    const View<const int32_t> edges = view_of(in.offsets, {E + 1});
    grouped_matmul_forward<T>(l, view_of(in.x_R, {R, D}),
                              view_of(in.up, {E, 2 * F, D}), edges,
                              view_of(h, {R, 2 * F}));
    const View<const T> both = view_of(in.h, {R, 2 * F});
    swiglu_forward<T>(l, both.slice(1, 0, F), both.slice(1, F, 2 * F),
                      view_of(act, {R, F}), edges);
    grouped_matmul_forward<T>(l, view_of(in.act, {R, F}),
                              view_of(in.down, {E, D, F}), edges,
                              view_of(y_R, {R, D}));
    combine_forward<T>(l, view_of(in.y_R, {R, D}), view_of(in.w, {N, K}),
                       view_of(in.row, {N, K}), view_of(y, {N, D}));
  }

  void backward(Launch l) {
    const Layer& in = *this;
    const View<const int32_t> edges = view_of(in.offsets, {E + 1});
    combine_backward<T>(l, view_of(in.dy, {N, D}), view_of(in.y_R, {R, D}),
                        view_of(in.w, {N, K}), view_of(in.row, {N, K}),
                        view_of(dy_R, {R, D}), view_of(dw, {N, K}));
    grouped_matmul_dgrad<T>(l, view_of(in.dy_R, {R, D}),
                            view_of(in.down, {E, D, F}), edges,
                            view_of(dact, {R, F}));
    grouped_matmul_wgrad<T, A>(l, view_of(in.dy_R, {R, D}),
                               view_of(in.act, {R, F}), edges,
                               view_of(ddown, {E, D, F}));
    const View<const T> both = view_of(in.h, {R, 2 * F});
    const View<T> dboth = view_of(dh, {R, 2 * F});
    swiglu_backward<T>(l, view_of(in.dact, {R, F}), both.slice(1, 0, F),
                       both.slice(1, F, 2 * F), dboth.slice(1, 0, F),
                       dboth.slice(1, F, 2 * F), edges);
    grouped_matmul_dgrad<T>(l, view_of(in.dh, {R, 2 * F}),
                            view_of(in.up, {E, 2 * F, D}), edges,
                            view_of(dx_R, {R, D}));
    grouped_matmul_wgrad<T, A>(l, view_of(in.dh, {R, 2 * F}),
                               view_of(in.x_R, {R, D}), edges,
                               view_of(dup, {E, 2 * F, D}));
    dispatch_backward<T>(l, view_of(in.dx_R, {R, D}), view_of(in.row, {N, K}),
                         view_of(dx, {N, D}));
    router_weights_backward<A>(
        l, view_of(in.dw, {N, K}), view_of(in.logits, {N, E}),
        view_of(in.ids, {N, K}), options, view_of(dlogits, {N, E}));
  }

  // y = m v for m [rows, columns] of expert e, or its transpose times v; every
  // element rounded to T, as what is kept between two ops.
  static std::vector<double> product(const Array<T>& m, int64_t e, int64_t rows,
                                     int64_t columns, bool transposed,
                                     const std::vector<double>& v) {
    const T* at = m.host(e * rows * columns, rows * columns);
    std::vector<double> out(transposed ? columns : rows);
    for (int64_t i = 0; i < rows; ++i) {
      if (transposed) {
        for (int64_t j = 0; j < columns; ++j) {
          out[j] += v[i] * double(at[i * columns + j]);
        }
      } else {
        for (int64_t j = 0; j < columns; ++j) {
          out[i] += double(at[i * columns + j]) * v[j];
        }
      }
    }
    for (double& value : out) value = rounded(value);
    return out;
  }
  static double rounded(double value) {
    if constexpr (std::is_same_v<T, double>) return value;
    return double(T(static_cast<float>(value)));
  }
  std::vector<double> widened(const Array<T>& of, int64_t i, int64_t n) const {
    const T* at = of.host(i * n, n);
    return {at, at + n};
  }

  // y of a token and, with a gradient, dx, from the token's row alone.
  void verify(Verifier& verifier, bool gradient) const {
    for (int64_t t : sampled_rows(N, 3)) {
      const A* row_logits = logits.host(t * E, E);
      double total = 0;
      for (int64_t k = 0; k < K; ++k) {
        total += std::exp(double(row_logits[ids[t * K + k]]));
      }
      std::vector<double> sum(D), dsum(D);
      for (int64_t k = 0; k < K; ++k) {
        const int64_t e = ids[t * K + k];
        const double share = std::exp(double(row_logits[e])) / total;
        const std::vector<double> both =
            product(up, e, 2 * F, D, false, widened(x, t, D));
        std::vector<double> mid(F);
        for (int64_t f = 0; f < F; ++f) {
          mid[f] = rounded(rounded(both[f] / (1 + std::exp(-both[f]))) *
                           both[F + f]);
        }
        const std::vector<double> out = product(down, e, D, F, false, mid);
        for (int64_t d = 0; d < D; ++d) sum[d] += share * out[d];
        if (!gradient) continue;
        std::vector<double> dout = widened(dy, t, D);
        for (double& v : dout) v = rounded(v * share);
        const std::vector<double> dmid = product(down, e, D, F, true, dout);
        std::vector<double> dboth(2 * F);
        for (int64_t f = 0; f < F; ++f) {
          const double g = both[f], s = 1 / (1 + std::exp(-g));
          dboth[f] = rounded(dmid[f] * both[F + f] * (s + g * s * (1 - s)));
          dboth[F + f] = rounded(dmid[f] * g * s);
        }
        const std::vector<double> din = product(up, e, 2 * F, D, true, dboth);
        for (int64_t d = 0; d < D; ++d) dsum[d] += din[d];
      }
      // h, its SwiGLU and the rows are rounded on the way, and back: where a
      // value lies between two of T, here as there but not always alike.
      const int64_t terms = D + F + rounded_terms<T>();
      verifier.row(y.row(t * D, D), sum, terms);
      if (gradient) verifier.row(dx.row(t * D, D), dsum, 2 * terms);
    }
    if (!gradient) return;
    verify_weight(verifier, ddown, dy_R, D, act, F);
    verify_weight(verifier, dup, dh, 2 * F, x_R, D);
  }
  // One row of the gradient of a weight, of its two factors as they are.
  void verify_weight(Verifier& verifier, const Array<A>& got,
                     const Array<T>& left, int64_t rows, const Array<T>& right,
                     int64_t columns) const {
    const int64_t e = E / 2, i = rows / 3;
    std::vector<double> sum(columns);
    for (int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
      const double g = kSums * double(left[r * rows + i]);
      const T* at = right.host(r * columns, columns);
      for (int64_t j = 0; j < columns; ++j) sum[j] += g * double(at[j]);
    }
    verifier.row(got.row((e * rows + i) * columns, columns), sum,
                 cut_terms(offsets[e + 1] - offsets[e]) + kSums);
  }

  int64_t N, K, E, D, F, R = 0;
  RouterOptions options;
  Array<T> x, up, down, x_R, h, act, y_R, y;
  Array<A> logits, w;
  Array<int32_t> ids, offsets, row, token, slot;
  Array<std::byte> route_space;
  Array<T> dy, dy_R, dact, dh, dx_R, dx;
  Array<A> dw, dlogits, dup, ddown;
};

template <bool kGradient>
Run make(const Arguments& a) {
  return dispatch_float(a.dtype, [&]<class T>() -> Run {
    auto layer = std::make_shared<Layer<T>>(a, kGradient);
    const double products =
        6.0 * static_cast<double>(layer->R * layer->D * layer->F);
    const auto launch = [layer, l = a.launch] {
      layer->forward(l);
      if (kGradient) layer->backward(l);
    };
    return {.launch = launch,
            .cost = {.flops = (kGradient ? 3 : 1) * products},
            .verify = [layer, launch](Verifier& verifier) {
              if (kGradient) {
                launch_from_zeros(launch, layer->dup, layer->ddown);
              }
              layer->verify(verifier, kGradient);
            }};
  });
}

const std::vector<std::string> kKeys = {"T", "k", "E", "H", "I"};
const std::vector<std::vector<int64_t>> kShapes = {{256, 2, 8, 64, 32}};
// Qwen3-30B.
const std::vector<std::vector<int64_t>> kModels = {{16384, 8, 128, 2048, 768},
                                                   {32768, 8, 128, 2048, 768}};
const Limits kLimits = {.broken = [](const std::vector<int64_t>& d) {
  return first_broken(
      {d[1] <= d[2] ? "" : "k is at most E", at_most(kMaxChoices, "k", d[1]),
       at_most(kMaxExperts, "E", d[2]), at_most(INT32_MAX / d[1], "T", d[0])});
}};

const bool added =
    add({"moe_ffn", "moe_ffn_fwd", kKeys, kShapes, make<false>, kModels},
        kLimits) &&
    add({"moe_ffn", "moe_ffn_fwdbwd", kKeys, kShapes, make<true>, kModels},
        kLimits);

}  // namespace
}  // namespace tapeline::bench
