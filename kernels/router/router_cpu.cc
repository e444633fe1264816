#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cuda_dispatch.h"
#include "kernels/router/router.h"
#include "kernels/router/router_cuda.h"
#include "kernels/router/scores.h"

namespace tapeline {
namespace {

using internal::kTinyScore;
using internal::Scores;

// Larger first; NaN after everything else.
template <class A>
bool better(A a, A b) {
  return a > b || (std::isnan(b) && !std::isnan(a));
}

// Indices of the k best of n values, best first, ties to the lower index.
template <class A>
void choose_best(const A* value, int n, int k, int32_t* ids) {
  int held = 0;
  A worst = 0;  // of those held; most values fail against it at once
  for (int i = 0; i < n; ++i) {
    if (held == k && !better(value[i], worst)) continue;
    int at = held < k ? held++ : k - 1;
    for (; at > 0 && better(value[i], value[ids[at - 1]]); --at) {
      ids[at] = ids[at - 1];
    }
    ids[at] = i;
    worst = value[ids[held - 1]];
  }
}

// What every group but the best becomes: unchoosable, even where all choice
// values are negative.
template <class A>
void drop_groups(A* choice, int experts, int groups, int top_groups) {
  const int size = experts / groups;
  A score[kMaxExperts];
  for (int g = 0; g < groups; ++g) {
    int32_t best[2];
    const int count = std::min(2, size);
    choose_best(choice + g * size, size, count, best);
    score[g] = choice[g * size + best[0]];
    if (count == 2) score[g] += choice[g * size + best[1]];
  }
  int32_t kept[kMaxChoices];
  choose_best(score, groups, top_groups, kept);
  for (int g = 0; g < groups; ++g) {
    if (std::find(kept, kept + top_groups, g) != kept + top_groups) continue;
    std::fill_n(choice + g * size, size, -std::numeric_limits<A>::infinity());
  }
}

template <class A>
void check_rows(const View<A>& rows, const char* name) {
  CHECK(rows.rank() == 2 && dense_rows(rows))
      << "[router] needs dense rows: " << name << " are " << describe(rows);
}

template <class A, class W>
void check_pair(const View<const A>& logits, const View<W>& per_slot,
                const RouterOptions& options, const char* name) {
  check_rows(logits, "logits");
  check_rows(per_slot, name);
  CHECK(per_slot.size(0) == logits.size(0) && per_slot.size(1) == options.top_k)
      << "[router] shapes: " << name << " are " << describe(per_slot)
      << ", logits are " << describe(logits) << ", top_k is " << options.top_k;
  CHECK(options.top_k >= 1 && options.top_k <= kMaxChoices &&
        options.top_k <= logits.size(1) && logits.size(1) <= kMaxExperts)
      << "[router] top_k " << options.top_k << " of " << logits.size(1)
      << " experts";
}

void check_id(int32_t id, int64_t experts) {
  CHECK(id >= -1 && id < experts)
      << "[router] expert id " << id << " of " << experts;
}

}  // namespace

template <class A>
void router_choose(Launch l, View<const A> logits, View<const A> bias,
                   const RouterOptions& options, View<int32_t> ids) {
  if (l.dry) return;
  check_pair(logits, ids, options, "ids");
  const int experts = static_cast<int>(logits.size(1));
  CHECK(!bias ||
        (bias.rank() == 1 && bias.contiguous() && bias.size(0) == experts))
      << "[router] bias is " << describe(bias) << " for " << experts
      << " experts";
  CHECK(options.groups >= 1 && experts % options.groups == 0 &&
        options.top_groups >= 1 && options.top_groups <= options.groups &&
        options.top_groups <= kMaxChoices)
      << "[router] " << options.top_groups << " of " << options.groups
      << " groups of " << experts << " experts";
  if (kCuda && l.on_cuda()) {
    return cuda::router_choose(l, logits, bias, options, ids);
  }
  l.threads->parallel_for(
      logits.size(0), rows_per_chunk(experts), [&](int64_t begin, int64_t end) {
        A choice[kMaxExperts];
        for (int64_t t = begin; t < end; ++t) {
          const Scores<A> s(&logits(t, 0), experts, options.score);
          s.fill(choice);
          for (int e = 0; bias && e < experts; ++e) choice[e] += bias.data[e];
          if (options.top_groups < options.groups) {
            drop_groups(choice, experts, options.groups, options.top_groups);
          }
          choose_best(choice, experts, options.top_k, &ids(t, 0));
        }
      });
}

template <class A>
void router_weights(Launch l, View<const A> logits, View<const int32_t> ids,
                    const RouterOptions& options, View<A> weight) {
  if (l.dry) return;
  check_pair(logits, ids, options, "ids");
  check_pair(logits, weight, options, "weights");
  if (kCuda && l.on_cuda()) {
    return cuda::router_weights(l, logits, ids, options, weight);
  }
  const int experts = static_cast<int>(logits.size(1));
  l.threads->parallel_for(
      logits.size(0), rows_per_chunk(experts), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          const Scores<A> s(&logits(t, 0), experts, options.score);
          A z = 0;
          for (int k = 0; k < options.top_k; ++k) {
            const int32_t e = ids(t, k);
            check_id(e, experts);
            weight(t, k) = e < 0 ? A(0) : s(e);
            z += weight(t, k);
          }
          const A divisor = options.normalize ? z + A(kTinyScore) : A(1);
          for (int k = 0; k < options.top_k; ++k) {
            weight(t, k) = weight(t, k) / divisor * A(options.scale);
          }
        }
      });
}

template <class A>
void router_weights_backward(Launch l, View<const A> dweight,
                             View<const A> logits, View<const int32_t> ids,
                             const RouterOptions& options, View<A> dlogits) {
  if (l.dry) return;
  check_pair(logits, ids, options, "ids");
  check_pair(logits, dweight, options, "dweights");
  check_rows(dlogits, "dlogits");
  CHECK(dlogits.shape == logits.shape)
      << "[router] shapes: dlogits are " << describe(dlogits) << ", logits are "
      << describe(logits);
  if (kCuda && l.on_cuda()) {
    return cuda::router_weights_backward(l, dweight, logits, ids, options,
                                         dlogits);
  }
  const int experts = static_cast<int>(logits.size(1));
  const int top_k = options.top_k;
  const bool softmax = options.score == RouterOptions::kSoftmax;
  l.threads->parallel_for(
      logits.size(0), rows_per_chunk(experts), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          const Scores<A> s(&logits(t, 0), experts, options.score);
          A chosen[kMaxChoices], ds[kMaxChoices];
          A z = A(kTinyScore), gs = 0;
          for (int k = 0; k < top_k; ++k) {
            const int32_t e = ids(t, k);
            check_id(e, experts);
            chosen[k] = e < 0 ? A(0) : s(e);
            ds[k] = A(options.scale) * dweight(t, k);
            z += chosen[k];
            if (e >= 0) gs += ds[k] * chosen[k];
          }
          if (options.normalize) {
            for (int k = 0; k < top_k; ++k) ds[k] = (ds[k] - gs / z) / z;
          }
          A sum = 0;  // of ds_j s_j: softmax's common part
          for (int k = 0; softmax && k < top_k; ++k) {
            if (ids(t, k) >= 0) sum += ds[k] * chosen[k];
          }
          A* out = &dlogits(t, 0);
          if (softmax) {
            s.fill(out);
            for (int e = 0; e < experts; ++e) out[e] *= -sum;
          } else {
            std::fill_n(out, experts, A(0));
          }
          for (int k = 0; k < top_k; ++k) {
            if (ids(t, k) < 0) continue;
            const A slope = softmax ? chosen[k] : chosen[k] * (1 - chosen[k]);
            out[ids(t, k)] += slope * ds[k];
          }
        }
      });
}

template void router_choose(Launch, View<const float>, View<const float>,
                            const RouterOptions&, View<int32_t>);
template void router_choose(Launch, View<const double>, View<const double>,
                            const RouterOptions&, View<int32_t>);
template void router_weights(Launch, View<const float>, View<const int32_t>,
                             const RouterOptions&, View<float>);
template void router_weights(Launch, View<const double>, View<const int32_t>,
                             const RouterOptions&, View<double>);
template void router_weights_backward(Launch, View<const float>,
                                      View<const float>, View<const int32_t>,
                                      const RouterOptions&, View<float>);
template void router_weights_backward(Launch, View<const double>,
                                      View<const double>, View<const int32_t>,
                                      const RouterOptions&, View<double>);

}  // namespace tapeline
