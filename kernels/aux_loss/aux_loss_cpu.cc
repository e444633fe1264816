#include <algorithm>
#include <array>

#include "kernels/aux_loss/aux_loss.h"
#include "kernels/aux_loss/aux_loss_cuda.h"
#include "kernels/cuda_dispatch.h"
#include "kernels/router/router.h"
#include "kernels/router/scores.h"
#include "kernels/simd_math.h"

namespace tapeline {
namespace {

using internal::kTinyScore;
using internal::Scores;

constexpr int64_t kTokensPerChunk = 64;
// A sum over tokens keeps one partial per chunk on the stack; longer inputs get
// longer chunks instead of more.
constexpr int64_t kMaxChunks = 128;

struct Range {
  int64_t begin, end;
};

bool is_valid(const TokenSet& set, int64_t t) {
  return !set.valid_T || set.valid_T(t) != 0;
}

int64_t sequences(const TokenSet& set) {
  return set.sequence_S1 ? set.sequence_S1.size(0) - 1 : 1;
}

Range sequence(const TokenSet& set, int64_t s, int64_t tokens) {
  if (!set.sequence_S1) return {0, tokens};
  return {set.sequence_S1(s), set.sequence_S1(s + 1)};
}

int64_t count_valid(const TokenSet& set, Range r) {
  int64_t n = 0;
  for (int64_t t = r.begin; t < r.end; ++t) n += is_valid(set, t);
  return n;
}

int64_t sequences_with_tokens(const TokenSet& set, int64_t tokens) {
  int64_t n = 0;
  for (int64_t s = 0; s < sequences(set); ++s) {
    n += count_valid(set, sequence(set, s, tokens)) > 0;
  }
  return n;
}

void check_set(const Launch& l, const TokenSet& set, int64_t tokens) {
  CHECK(!set.valid_T || set.valid_T.shape == Shape{tokens})
      << "[aux_loss] valid is " << describe(set.valid_T) << " for " << tokens
      << " tokens";
  if (!set.sequence_S1) return;
  const View<const int32_t> starts = set.sequence_S1;
  CHECK(starts.rank() == 1 && starts.size(0) >= 2)
      << "[aux_loss] sequence starts are " << describe(starts);
  if (l.on_cuda()) return;  // what they hold is not for the host to read
  CHECK(starts(0) == 0 && starts(starts.size(0) - 1) == tokens)
      << "[aux_loss] sequence starts, " << describe(starts)
      << ", must run from 0 to " << tokens;
  for (int64_t s = 0; s < sequences(set); ++s) {
    const Range r = sequence(set, s, tokens);
    CHECK_LE(r.begin, r.end) << "[aux_loss] sequence starts must not fall";
  }
}

template <class A>
void check_loss(const View<A>& loss, const View<double>& partial) {
  CHECK(loss.elements() == 1 &&
        (!partial ||
         (partial.contiguous() && partial.elements() >= kLossPartials)))
      << "[aux_loss] loss is " << describe(loss) << ", partial is "
      << describe(partial);
}

template <class A>
void check_logits(const Launch& l, const View<const A>& logits,
                  const TokenSet& set) {
  CHECK(logits.rank() == 2 && dense_rows(logits) && logits.size(1) >= 1 &&
        logits.size(1) <= kMaxExperts)
      << "[aux_loss] needs dense rows of 1 to " << kMaxExperts
      << " experts: logits are " << describe(logits);
  check_set(l, set, logits.size(0));
}

template <class A>
void check_dlogits(const View<const A>& logits, const View<A>& dlogits) {
  CHECK(dlogits.shape == logits.shape && dense_rows(dlogits))
      << "[aux_loss] shapes: dlogits are " << describe(dlogits)
      << ", logits are " << describe(logits);
}

// counts [S, E], whether they came as [S, E] or, for one sequence, as [E].
template <class C>
View<C> by_sequence(const View<C>& counts, const TokenSet& set,
                    int64_t experts) {
  const View<C> two = counts.rank() == 1
                          ? View<C>(counts.data, Shape{1, counts.size(0)},
                                    Shape{0, counts.strides[0]})
                          : counts;
  CHECK(two.rank() == 2 && two.size(0) == sequences(set) &&
        (experts < 0 || two.size(1) == experts))
      << "[aux_loss] counts are " << describe(counts) << " for "
      << sequences(set) << " sequences";
  return two;
}

// Sum of term(t) over the valid tokens of a range, in an order that depends on
// the range alone.
template <class Term>
double sum_over_tokens(Launch l, Range r, const TokenSet& set, Term term) {
  const int64_t n = r.end - r.begin;
  const int64_t grain = std::max(kTokensPerChunk, ceil_div(n, kMaxChunks));
  std::array<double, kMaxChunks> partial{};
  l.threads->parallel_for(n, grain, [&](int64_t begin, int64_t end) {
    double sum = 0;
    for (int64_t t = r.begin + begin; t < r.begin + end; ++t) {
      if (is_valid(set, t)) sum += static_cast<double>(term(t));
    }
    partial[begin / grain] = sum;
  });
  double sum = 0;
  for (double p : partial) sum += p;
  return sum;
}

// Calls row(t, dlogits of t) for every valid token of a range; the others get
// zeros.
template <class A, class Row>
void for_each_row(Launch l, Range r, const TokenSet& set,
                  const View<A>& dlogits, Row row) {
  l.threads->parallel_for(
      r.end - r.begin, kTokensPerChunk, [&](int64_t begin, int64_t end) {
        for (int64_t t = r.begin + begin; t < r.begin + end; ++t) {
          A* out = &dlogits(t, 0);
          if (is_valid(set, t)) {
            row(t, out);
          } else {
            std::fill_n(out, dlogits.size(1), A(0));
          }
        }
      });
}

// f_e of one sequence; false if nothing was counted.
template <class A>
bool load_fractions(const View<const int32_t>& counts, A* f) {
  const int64_t experts = counts.size(0);
  int64_t total = 0;
  for (int64_t e = 0; e < experts; ++e) total += counts(e);
  if (total == 0) return false;
  for (int64_t e = 0; e < experts; ++e) {
    f[e] = static_cast<A>(static_cast<double>(experts) * counts(e) /
                          static_cast<double>(total));
  }
  return true;
}

// What balance needs of one token: p_e = q_e / z, and sum_e f_e p_e.
template <class A>
struct Quotient {
  A z = 1;
  A weighted = 0;
};

// Fills s with the scores.
template <class A>
Quotient<A> quotient(BalanceKind kind, const A* logit, const A* bias,
                     const A* f, int experts, A* s) {
  const bool softmax = kind == BalanceKind::kSoftmax;
  Scores<A>(logit, experts,
            softmax ? RouterOptions::kSoftmax : RouterOptions::kSigmoid)
      .fill(s);
  Quotient<A> out;
  if (!softmax) out.z = sum(s, experts) + A(kTinyScore);
  out.weighted = dot(f, s, experts);
  if (kind == BalanceKind::kBiasedSigmoid) {
    out.z += sum(bias, experts);
    out.weighted += dot(f, bias, experts);
  }
  out.weighted /= out.z;
  return out;
}

template <class A>
const A* check_bias(BalanceKind kind, const View<const A>& bias,
                    int64_t experts) {
  if (kind != BalanceKind::kBiasedSigmoid) return nullptr;
  CHECK(bias && bias.shape == Shape{experts} && bias.contiguous())
      << "[aux_loss] bias is " << describe(bias) << " for " << experts
      << " experts";
  return bias.data;
}

}  // namespace

template <class C>
void count_experts(Launch l, View<const int32_t> ids, const TokenSet& set,
                   View<C> counts) {
  if (l.dry) return;
  CHECK_EQ(ids.rank(), 2);
  check_set(l, set, ids.size(0));
  const View<C> by_s = by_sequence(counts, set, -1);
  if (kCuda && l.on_cuda()) {
    return cuda::count_experts(l, ids, set, by_s);
  }
  const int64_t experts = by_s.size(1);
  for (int64_t s = 0; s < by_s.size(0); ++s) {
    for (int64_t e = 0; e < experts; ++e) by_s(s, e) = 0;
    const Range r = sequence(set, s, ids.size(0));
    for (int64_t t = r.begin; t < r.end; ++t) {
      if (!is_valid(set, t)) continue;
      for (int64_t k = 0; k < ids.size(1); ++k) {
        const int32_t e = ids(t, k);
        CHECK(e >= -1 && e < experts)
            << "[aux_loss] expert id " << e << " of " << experts;
        if (e >= 0) ++by_s(s, e);
      }
    }
  }
}

template <class A>
void balance_loss_forward(Launch l, BalanceKind kind, View<const A> logits,
                          View<const A> bias, View<const int32_t> counts,
                          const TokenSet& set, View<A> loss,
                          View<double> partial) {
  if (l.dry) return;
  check_logits(l, logits, set);
  check_loss(loss, partial);
  const int64_t tokens = logits.size(0);
  const int experts = static_cast<int>(logits.size(1));
  const A* b = check_bias(kind, bias, experts);
  const View<const int32_t> by_s = by_sequence(counts, set, experts);
  if (kCuda && l.on_cuda()) {
    return cuda::balance_loss_forward(l, kind, logits, b, by_s, set, loss,
                                      partial);
  }
  const int64_t filled = sequences_with_tokens(set, tokens);
  double total = 0;
  for (int64_t s = 0; s < by_s.size(0); ++s) {
    const Range r = sequence(set, s, tokens);
    A f[kMaxExperts];
    const int64_t valid = count_valid(set, r);
    if (valid == 0 || !load_fractions(by_s[s], f)) continue;
    const double sum = sum_over_tokens(l, r, set, [&](int64_t t) {
      A scores[kMaxExperts];
      return quotient(kind, &logits(t, 0), b, f, experts, scores).weighted;
    });
    total += sum / static_cast<double>(valid);
  }
  *loss.data = filled == 0 ? A(0) : A(total / static_cast<double>(filled));
}

template <class A>
void balance_loss_backward(Launch l, double dloss, BalanceKind kind,
                           View<const A> logits, View<const A> bias,
                           View<const int32_t> counts, const TokenSet& set,
                           View<A> dlogits) {
  if (l.dry) return;
  check_logits(l, logits, set);
  check_dlogits(logits, dlogits);
  const int64_t tokens = logits.size(0);
  const int experts = static_cast<int>(logits.size(1));
  const A* b = check_bias(kind, bias, experts);
  const View<const int32_t> by_s = by_sequence(counts, set, experts);
  if (kCuda && l.on_cuda()) {
    return cuda::balance_loss_backward(l, dloss, kind, logits, b, by_s, set,
                                       dlogits);
  }
  const int64_t filled = sequences_with_tokens(set, tokens);
  for (int64_t s = 0; s < by_s.size(0); ++s) {
    const Range r = sequence(set, s, tokens);
    A f[kMaxExperts];
    const int64_t valid = count_valid(set, r);
    const bool counted = load_fractions(by_s[s], f);
    const A g = A(dloss / (static_cast<double>(std::max<int64_t>(valid, 1)) *
                           static_cast<double>(std::max<int64_t>(filled, 1))));
    for_each_row(l, r, set, dlogits, [&](int64_t t, A* out) {
      if (!counted) {
        std::fill_n(out, experts, A(0));
        return;
      }
      const Quotient<A> p = quotient(kind, &logits(t, 0), b, f, experts, out);
      // d p_e' / d q_e = ([e' = e] - p_e') / z, and q_e = s_e + const; softmax
      // has z = 1 and slope s instead of s (1 - s).
      const A scale = g / p.z;
      const bool softmax = kind == BalanceKind::kSoftmax;
#pragma omp simd
      for (int e = 0; e < experts; ++e) {
        const A slope = softmax ? out[e] : out[e] * (A(1) - out[e]);
        out[e] = slope * scale * (f[e] - p.weighted);
      }
    });
  }
}

template <class A>
void z_loss_forward(Launch l, View<const A> logits, const TokenSet& set,
                    View<A> loss, View<double> partial) {
  if (l.dry) return;
  check_logits(l, logits, set);
  check_loss(loss, partial);
  if (kCuda && l.on_cuda()) {
    return cuda::z_loss_forward(l, logits, set, loss, partial);
  }
  const int experts = static_cast<int>(logits.size(1));
  const Range all{0, logits.size(0)};
  const int64_t valid = count_valid(set, all);
  const double sum = sum_over_tokens(l, all, set, [&](int64_t t) {
    const Scores<A> p(&logits(t, 0), experts, RouterOptions::kSoftmax);
    return p.log_sum_exp() * p.log_sum_exp();
  });
  *loss.data = valid == 0 ? A(0) : A(sum / static_cast<double>(valid));
}

template <class A>
void z_loss_backward(Launch l, double dloss, View<const A> logits,
                     const TokenSet& set, View<A> dlogits) {
  if (l.dry) return;
  check_logits(l, logits, set);
  check_dlogits(logits, dlogits);
  if (kCuda && l.on_cuda()) {
    return cuda::z_loss_backward(l, dloss, logits, set, dlogits);
  }
  const int experts = static_cast<int>(logits.size(1));
  const Range all{0, logits.size(0)};
  const A g =
      A(2 * dloss /
        static_cast<double>(std::max<int64_t>(count_valid(set, all), 1)));
  for_each_row(l, all, set, dlogits, [&](int64_t t, A* out) {
    const Scores<A> p(&logits(t, 0), experts, RouterOptions::kSoftmax);
    const A scale = g * p.log_sum_exp();
    p.fill(out);
#pragma omp simd
    for (int e = 0; e < experts; ++e) out[e] *= scale;
  });
}

void update_router_bias(Launch l, View<const int64_t> counts, double rate,
                        View<float> bias, View<const double> clip) {
  if (l.dry) return;
  const auto error = [&] {
    return "[aux_loss] shapes: counts are " + describe(counts) + ", bias is " +
           describe(bias);
  };
  CHECK(counts.rank() == 1 || counts.rank() == 2) << error();
  CHECK(bias.rank() == 1 && bias.size(0) == counts.size(-1)) << error();
  CHECK(!clip || clip.elements() == 1)
      << "[aux_loss] clip is " << describe(clip);
  const int64_t experts = bias.size(0);
  if (counts.rank() == 1) {
    counts = View<const int64_t>(counts.data, Shape{1, experts},
                                 Shape{experts, counts.strides[0]});
  }
  if (kCuda && l.on_cuda()) {
    return cuda::update_router_bias(l, counts, rate, bias, clip);
  }
  if (clip && !std::isfinite(*clip.data)) return;
  const auto count = [&](int64_t e) {
    int64_t sum = 0;
    for (int64_t m = 0; m < counts.size(0); ++m) sum += counts(m, e);
    return sum;
  };
  int64_t total = 0;
  for (int64_t e = 0; e < experts; ++e) total += count(e);
  for (int64_t e = 0; e < experts; ++e) {
    // The sign of mean - c, in integers.
    const int64_t short_of = total - experts * count(e);
    const int sign = (short_of > 0) - (short_of < 0);
    bias(e) += static_cast<float>(rate) * static_cast<float>(sign);
  }
}

#define INSTANTIATE(A)                                                        \
  template void balance_loss_forward(Launch, BalanceKind, View<const A>,      \
                                     View<const A>, View<const int32_t>,      \
                                     const TokenSet&, View<A>, View<double>); \
  template void balance_loss_backward(                                        \
      Launch, double, BalanceKind, View<const A>, View<const A>,              \
      View<const int32_t>, const TokenSet&, View<A>);                         \
  template void z_loss_forward(Launch, View<const A>, const TokenSet&,        \
                               View<A>, View<double>);                        \
  template void z_loss_backward(Launch, double, View<const A>,                \
                                const TokenSet&, View<A>)
INSTANTIATE(float);
INSTANTIATE(double);
#undef INSTANTIATE
template void count_experts(Launch, View<const int32_t>, const TokenSet&,
                            View<int32_t>);
template void count_experts(Launch, View<const int32_t>, const TokenSet&,
                            View<int64_t>);

}  // namespace tapeline
