// The head of a language model, forward and backward: logits as one product,
// cross-entropy that turns them into their gradient in place, the gradients of
// the input and, in fp32, of the weight.
#include <cmath>
#include <memory>
#include <vector>

#include "kernels/bench/bench.h"
#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/matmul/matmul.h"

namespace tapeline::bench {
namespace {

template <class T>
struct Head {
  using A = Accumulator<T>;

  explicit Head(const Arguments& a)
      : N(a.dims[0]),
        D(a.dims[1]),
        V(a.dims[2]),
        x(normal<T>(N * D, 1)),
        w(normal<T>(V * D, 2)),
        logits(N * V),
        dx(N * D),
        dw(V * D),
        loss(N),
        lse(N),
        weight(std::vector<A>(N, A(1) / static_cast<A>(N))) {
    const View<T> values = view_of(w, {V * D});
    scale<T>(a.launch, 1 / std::sqrt(static_cast<double>(D)),
             View<const T>(values), values);
    for (int64_t t = 0; t < N; ++t) {
      labels.push_back(static_cast<int32_t>(t * 7919 % V));
    }
    device_labels = Array<int32_t>(labels);
  }
  void launch(Launch l) {
    const Head& in = *this;
    matmul<T, T>(l, view_of(in.x, {N, D}), view_of(in.w, {V, D}),
                 view_of(logits, {N, V}), {.transpose_b = true});
    cross_entropy_forward_backward<T>(
        l, view_of(logits, {N, V}), view_of(in.device_labels, {N}),
        view_of(in.weight, {N}), view_of(loss, {N}), view_of(lse, {N}));
    matmul<T, T>(l, view_of(in.logits, {N, V}), view_of(in.w, {V, D}),
                 view_of(dx, {N, D}));
    matmul<T, A>(l, view_of(in.logits, {N, V}), view_of(in.x, {N, D}),
                 view_of(dw, {V, D}),
                 {.transpose_a = true, .accumulate = true});
  }

  void verify(Verifier& verifier) const {
    const T* all = w.host(0, V * D);
    const std::vector<int64_t> columns = sampled_rows(D, 64);
    const Shape shape{static_cast<int64_t>(columns.size())};
    for (int64_t t : sampled_rows(N, 2)) {
      // In A, whose rounding is far below that of the logits to T.
      const T* x_row = x.host(t * D, D);
      std::vector<double> row(V);
      double sum = 0;
      for (int64_t v = 0; v < V; ++v) {
        A dot = 0;
        for (int64_t d = 0; d < D; ++d) dot += A(x_row[d]) * A(all[v * D + d]);
        row[v] = double(T(dot));
        sum += std::exp(row[v]);
      }
      const double norm = std::log(sum);
      verifier.row(loss.row(t, 1), {norm - row[labels[t]]}, V, 4);
      const T* dlogits = logits.host(t * V, V);
      // All but the label's element, which outweighs the rest of its row.
      std::vector<double> expected, from_dlogits(columns.size());
      std::vector<T> others;
      for (int64_t v = 0; v < V; ++v) {
        if (v != labels[t]) {
          expected.push_back(std::exp(row[v] - norm) / static_cast<double>(N));
          others.push_back(dlogits[v]);
        }
        for (size_t c = 0; c < columns.size(); ++c) {
          from_dlogits[c] +=
              double(dlogits[v]) * double(all[v * D + columns[c]]);
        }
      }
      // A logit's rounding to T moves its exponential by as much.
      verifier.row(View<const T>(others.data(), {V - 1}), expected, V, 4);
      const std::vector<T> got = at_columns(dx, t, D, columns);
      verifier.row(view_of(got, shape), from_dlogits, V);
    }
    for (int64_t v : {int64_t{0}, V / 2}) {
      std::vector<double> sum(columns.size());
      for (int64_t t = 0; t < N; ++t) {
        const double g = kSums * double(logits[t * V + v]);
        for (size_t c = 0; c < columns.size(); ++c) {
          sum[c] += g * double(x[t * D + columns[c]]);
        }
      }
      const std::vector<A> got = at_columns(dw, v, D, columns);
      verifier.row(view_of(got, shape), sum, cut_terms(N) + kSums);
    }
  }

  int64_t N, D, V;
  Array<T> x, w, logits, dx;
  Array<A> dw, loss, lse, weight;
  std::vector<int32_t> labels;
  Array<int32_t> device_labels;
};

Run make(const Arguments& a) {
  return dispatch_float(a.dtype, [&]<class T>() -> Run {
    auto head = std::make_shared<Head<T>>(a);
    const auto launch = [head, l = a.launch] { head->launch(l); };
    return {.launch = launch,
            .cost = {.flops = 6.0 * static_cast<double>(head->N * head->D) *
                              static_cast<double>(head->V)},
            .verify = [head, launch](Verifier& verifier) {
              launch_from_zeros(launch, head->dw);
              head->verify(verifier);
            }};
  });
}

// Qwen3-235B and GLM-5.2.
const bool added = add({"linear_ce",
                        "linear_ce_fwdbwd",
                        {"T", "H", "V"},
                        {{64, 32, 512}},
                        make,
                        {{8192, 4096, 151936}, {4096, 6144, 154880}}});

}  // namespace
}  // namespace tapeline::bench
