#include "kernels/aux_loss/aux_loss.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/aux_loss/aux_loss_cases.h"
#include "tests/support/buffer.h"
#include "tests/support/close.h"
#include "tests/support/finite_differences.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

constexpr BalanceKind kKinds[] = {BalanceKind::kSigmoid, BalanceKind::kSoftmax,
                                  BalanceKind::kBiasedSigmoid};

// Logits of padding stay poison and its ids name no expert: neither may be
// read.
template <class A>
struct Problem {
  Problem(const AuxLossCase& c, BalanceKind kind, bool per_sequence)
      : tokens(c.starts.back()),
        experts(c.experts),
        top_k(c.top_k),
        kind(kind),
        per_sequence(per_sequence),
        starts(c.starts),
        valid(valid_of(c)),
        ids(expert_ids_of(c)),
        logits({tokens, experts}, /*gap=*/3),
        bias({experts}) {
    Buffer<A> values({tokens, experts});
    values.normal(1);
    bias.normal(2, 0.1f);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t k = 0; !valid[t] && k < top_k; ++k) {
        ids[t * top_k + k] = 1 << 30;
      }
      for (int64_t e = 0; valid[t] && e < experts; ++e) {
        logits.view()(t, e) = values.view()(t, e);
      }
    }
    counts.resize(groups().size() * experts, 1 << 30);
    count_experts(launch(), view_of(ids, Shape{tokens, top_k}), set(),
                  counts_mutable());
  }

  TokenSet set() const {
    TokenSet out;
    out.valid_T = view_of(valid, Shape{tokens});
    if (per_sequence) {
      out.sequence_S1 =
          view_of(starts, Shape{static_cast<int64_t>(starts.size())});
    }
    return out;
  }
  View<const A> bias_view() const {
    if (kind == BalanceKind::kBiasedSigmoid) return bias.view();
    return {};
  }
  View<int32_t> counts_mutable() {
    return view_of(counts,
                   Shape{static_cast<int64_t>(groups().size()), experts});
  }
  View<const int32_t> counts_view() const {
    return view_of(counts,
                   Shape{static_cast<int64_t>(groups().size()), experts});
  }
  // Sums in f64 that differ in their order alone.
  template <class F>
  static void expect_the_same_by_all_processors(const Buffer<A>& loss, F f) {
    Buffer<A> again({1});
    Buffer<double> partial({kLossPartials});
    f(again.view(), partial.view());
    EXPECT_TRUE(Close(again.in(), loss.in()));
    EXPECT_TRUE(again.guards_intact() && partial.guards_intact());
  }
  A balance(Launch l = launch()) const {
    Buffer<A> loss({1});
    balance_loss_forward(l, kind, logits.in(), bias_view(), counts_view(),
                         set(), loss.view());
    EXPECT_TRUE(loss.guards_intact());
    expect_the_same_by_all_processors(loss, [&](View<A> to, View<double> part) {
      balance_loss_forward(l, kind, logits.in(), bias_view(), counts_view(),
                           set(), to, part);
    });
    return loss.view()(0);
  }
  Buffer<A> balance_gradient(double dloss, Launch l = launch()) const {
    Buffer<A> d({tokens, experts}, 2);
    balance_loss_backward(l, dloss, kind, logits.in(), bias_view(),
                          counts_view(), set(), d.view());
    EXPECT_TRUE(d.guards_intact());
    return d;
  }
  A z(Launch l = launch()) const {
    Buffer<A> loss({1});
    z_loss_forward(l, logits.in(), set(), loss.view());
    expect_the_same_by_all_processors(loss, [&](View<A> to, View<double> part) {
      z_loss_forward(l, logits.in(), set(), to, part);
    });
    return loss.view()(0);
  }
  Buffer<A> z_gradient(double dloss, Launch l = launch()) const {
    Buffer<A> d({tokens, experts}, 2);
    z_loss_backward(l, dloss, logits.in(), set(), d.view());
    EXPECT_TRUE(d.guards_intact());
    return d;
  }

  // The valid tokens of every sequence, or of the whole batch.
  std::vector<std::vector<int64_t>> groups() const {
    std::vector<std::vector<int64_t>> out(1);
    if (per_sequence) out.resize(starts.size() - 1);
    for (int64_t t = 0; t < tokens; ++t) {
      size_t s = 0;
      while (per_sequence && starts[s + 1] <= t) ++s;
      if (valid[t]) out[s].push_back(t);
    }
    return out;
  }

  int64_t tokens, experts, top_k;
  BalanceKind kind;
  bool per_sequence;
  std::vector<int32_t> starts;
  std::vector<uint8_t> valid;
  std::vector<int32_t> ids, counts;
  Buffer<A> logits, bias;
};

// E / (T K) sum_e c_e mean_t p[t, e] as the spec writes it, in f64.
template <class A>
double expected_balance(const Problem<A>& p) {
  double total = 0;
  int filled = 0;
  for (const std::vector<int64_t>& group : p.groups()) {
    if (group.empty()) continue;
    ++filled;
    std::vector<double> c(p.experts), mean(p.experts);
    for (int64_t t : group) {
      for (int64_t k = 0; k < p.top_k; ++k) ++c[p.ids[t * p.top_k + k]];
      std::vector<double> q;
      double sum = 0;
      for (int64_t e = 0; e < p.experts; ++e) {
        const double l = p.logits.view()(t, e);
        const double s = 1 / (1 + std::exp(-l));
        switch (p.kind) {
          case BalanceKind::kSigmoid:
            q.push_back(s);
            break;
          case BalanceKind::kSoftmax:
            q.push_back(std::exp(l));
            break;
          case BalanceKind::kBiasedSigmoid:
            q.push_back(s + double(p.bias.view()(e)));
            break;
        }
        sum += q.back();
      }
      for (int64_t e = 0; e < p.experts; ++e) {
        mean[e] += q[e] / sum / static_cast<double>(group.size());
      }
    }
    double dot = 0;
    for (int64_t e = 0; e < p.experts; ++e) dot += c[e] * mean[e];
    total += dot * static_cast<double>(p.experts) /
             static_cast<double>(group.size() * p.top_k);
  }
  return filled == 0 ? 0 : total / filled;
}

template <class A>
double expected_z(const Problem<A>& p) {
  double total = 0;
  int64_t tokens = 0;
  for (const std::vector<int64_t>& group : p.groups()) {
    for (int64_t t : group) {
      double sum = 0;
      for (int64_t e = 0; e < p.experts; ++e) {
        sum += std::exp(double(p.logits.view()(t, e)));
      }
      total += std::log(sum) * std::log(sum);
      ++tokens;
    }
  }
  return tokens == 0 ? 0 : total / static_cast<double>(tokens);
}

// A gradient in f64 against finite differences, rounded to float, and in f32.
// The tokens' terms cancel within a row, so small elements carry the rounding
// of large ones.
void expect_near(const std::vector<double>& got,
                 const std::vector<float>& numeric,
                 const std::vector<double>& f32) {
  double largest = 0;
  for (double v : got) largest = std::max(largest, std::abs(v));
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], numeric[i], 1e-9 + 1e-7 * largest) << "at " << i;
    ASSERT_NEAR(f32[i], got[i], 1e-6 * largest + 1e-9) << "at " << i;
  }
}

class AuxLossCases : public testing::TestWithParam<AuxLossCase> {};
INSTANTIATE_TEST_SUITE_P(, AuxLossCases, testing::ValuesIn(aux_loss_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(AuxLossCases, CountsAreTheAssignmentsOfValidTokens) {
  for (bool per_sequence : {false, true}) {
    const Problem<float> p(GetParam(), BalanceKind::kSigmoid, per_sequence);
    std::vector<int32_t> expected;
    for (const std::vector<int64_t>& group : p.groups()) {
      for (int32_t e = 0; e < p.experts; ++e) {
        int32_t n = 0;
        for (int64_t t : group) {
          n += static_cast<int32_t>(std::count(
              &p.ids[t * p.top_k], &p.ids[t * p.top_k] + p.top_k, e));
        }
        expected.push_back(n);
      }
    }
    EXPECT_EQ(p.counts, expected);
  }
}

TEST_P(AuxLossCases, BalanceAgreesWithTheDefinition) {
  for (bool per_sequence : {false, true}) {
    Problem<float> p(GetParam(), BalanceKind::kSigmoid, per_sequence);
    Problem<double> q(GetParam(), BalanceKind::kSigmoid, per_sequence);
    for (BalanceKind kind : kKinds) {
      p.kind = q.kind = kind;
      EXPECT_NEAR(p.balance(), expected_balance(p), 1e-6);
      EXPECT_NEAR(q.balance(), expected_balance(q), 1e-14);
    }
  }
}

TEST_P(AuxLossCases, BalanceBackwardIsTheDerivative) {
  for (BalanceKind kind : kKinds) {
    for (bool per_sequence : {false, true}) {
      Problem<double> p(GetParam(), kind, per_sequence);
      const auto numeric =
          numeric_gradient(p.logits, [&] { return 1.5 * p.balance(); });
      const std::vector<double> got = p.balance_gradient(1.5).values();
      const std::vector<double> f32 =
          Problem<float>(GetParam(), kind, per_sequence)
              .balance_gradient(1.5)
              .values();
      expect_near(got, numeric, f32);
    }
  }
}

TEST_P(AuxLossCases, ZLossAgreesWithTheDefinition) {
  const Problem<float> p(GetParam(), BalanceKind::kSoftmax, false);
  const Problem<double> q(GetParam(), BalanceKind::kSoftmax, true);
  const double expected = expected_z(q);
  EXPECT_NEAR(p.z(), expected, 1e-6 * (1 + expected));
  EXPECT_NEAR(q.z(), expected, 1e-14 * (1 + expected));
}

TEST_P(AuxLossCases, ZLossBackwardIsTheDerivative) {
  Problem<double> p(GetParam(), BalanceKind::kSoftmax, false);
  const Problem<float> q(GetParam(), BalanceKind::kSoftmax, false);
  const auto numeric = numeric_gradient(p.logits, [&] { return 3 * p.z(); });
  const std::vector<double> got = p.z_gradient(3).values();
  const std::vector<double> f32 = q.z_gradient(3).values();
  expect_near(got, numeric, f32);
}

TEST_P(AuxLossCases, PaddingHasGradientZero) {
  const Problem<float> p(GetParam(), BalanceKind::kSigmoid, true);
  const Buffer<float> balance = p.balance_gradient(1), z = p.z_gradient(1);
  for (int64_t t = 0; t < p.tokens; ++t) {
    for (int64_t e = 0; e < p.experts; ++e) {
      if (p.valid[t]) continue;
      EXPECT_EQ(balance.view()(t, e), 0);
      EXPECT_EQ(z.view()(t, e), 0);
    }
  }
}

TEST(AuxLoss, BalancedLoadIsOne) {
  Problem<double> p({"", 4, 2, {0, 6}, AuxLossCase::kNone},
                    BalanceKind::kSigmoid, false);
  p.counts = {3, 3, 3, 3};
  EXPECT_NEAR(p.balance(), 1, 1e-15);
  p.logits.set(std::vector<double>(24, 0.5));
  p.counts = {12, 0, 0, 0};  // equal probabilities: the counts do not matter
  EXPECT_NEAR(p.balance(), 1, 1e-15);
}

TEST(AuxLoss, CountsOfAllRanksGiveTheSameFractions) {
  Problem<double> p({"", 4, 2, {0, 6}, AuxLossCase::kNone},
                    BalanceKind::kSigmoid, false);
  const double alone = p.balance();
  for (int32_t& c : p.counts) c *= 8;
  EXPECT_EQ(p.balance(), alone);
}

TEST(AuxLoss, NoCountsGiveZeroNotNan) {
  Problem<float> p({"", 4, 2, {0, 6}, AuxLossCase::kNone},
                   BalanceKind::kSigmoid, false);
  p.counts = {0, 0, 0, 0};
  EXPECT_EQ(p.balance(), 0);
  EXPECT_EQ(p.balance_gradient(1).values(), std::vector<double>(24, 0));
}

TEST(AuxLoss, UnroutedIdsCountNowhere) {
  const std::vector<int32_t> ids = {0, -1, 2, 0, -1, -1};
  std::vector<int64_t> counts(3, -7);
  count_experts(launch(), view_of(ids, Shape{3, 2}), {},
                view_of(counts, Shape{3}));
  EXPECT_EQ(counts, (std::vector<int64_t>{2, 0, 1}));
}

TEST(AuxLoss, BiasMovesAgainstTheLoad) {
  // Mean 4: expert 0 is over it, 1 and 3 are under it, 2 is on it.
  const std::vector<int64_t> counts = {10, 2, 4, 0};
  std::vector<float> bias = {0.5f, -0.25f, 0.125f, 0};
  update_router_bias(launch(), view_of(counts, Shape{4}), 1e-3,
                     view_of(bias, Shape{4}));
  EXPECT_EQ(bias,
            (std::vector<float>{0.5f - 1e-3f, -0.25f + 1e-3f, 0.125f, 1e-3f}));
}

TEST(AuxLoss, BiasComparesWithAMeanThatIsNoInteger) {
  const std::vector<int64_t> counts = {1, 0, 0};  // mean a third
  std::vector<float> bias(3);
  update_router_bias(launch(), view_of(counts, Shape{3}), 1,
                     view_of(bias, Shape{3}));
  EXPECT_EQ(bias, (std::vector<float>{-1, 1, 1}));
}

TEST(AuxLoss, BiasStaysWithoutCounts) {
  const std::vector<int64_t> counts(3);
  std::vector<float> bias = {1, 2, 3};
  update_router_bias(launch(), view_of(counts, Shape{3}), 1,
                     view_of(bias, Shape{3}));
  EXPECT_EQ(bias, (std::vector<float>{1, 2, 3}));
}

TEST(AuxLoss, BiasAddsTheCountsOfMicroBatches) {
  // Together 6, 0, 3: mean 3.
  const std::vector<int64_t> counts = {6, 0, 0, 0, 0, 3};
  std::vector<float> bias(3);
  update_router_bias(launch(), view_of(counts, Shape{2, 3}), 0.5,
                     view_of(bias, Shape{3}));
  EXPECT_EQ(bias, (std::vector<float>{-0.5f, 0.5f, 0}));
}

TEST(AuxLoss, BiasStaysWhereTheStepIsNotTaken) {
  const std::vector<int64_t> counts = {1, 0, 0};
  std::vector<float> bias(3);
  std::vector<double> clip = {std::nan("")};
  const auto update = [&] {
    update_router_bias(launch(), view_of(counts, Shape{3}), 1,
                       view_of(bias, Shape{3}),
                       view_of(std::as_const(clip), Shape{1}));
  };
  update();
  EXPECT_EQ(bias, (std::vector<float>{0, 0, 0}));
  clip[0] = 0.25;  // a clip factor does not scale the rate
  update();
  EXPECT_EQ(bias, (std::vector<float>{-1, 1, 1}));
}

TEST(AuxLoss, ThreadsDoNotChangeABit) {
  // In f64 as well: a loss in f32 would hide the order of a sum made in f64.
  const AuxLossCase c = {"", 24, 4, {0, 300, 2000}, AuxLossCase::kSome};
  for (BalanceKind kind : kKinds) {
    const Problem<double> p(c, kind, true);
    const Problem<float> q(c, kind, true);
    Buffer<double> loss({1});
    Buffer<float> d({1});
    EXPECT_TRUE(SameForAnyThreads(
        loss, [&](Launch l) { loss.view()(0) = p.balance(l); }));
    EXPECT_TRUE(
        SameForAnyThreads(loss, [&](Launch l) { loss.view()(0) = p.z(l); }));
    EXPECT_TRUE(
        SameForAnyThreads(d, [&](Launch l) { d = q.balance_gradient(1, l); }));
    EXPECT_TRUE(
        SameForAnyThreads(d, [&](Launch l) { d = q.z_gradient(1, l); }));
  }
}

// On the CPU: elsewhere the host cannot read ids and starts.
TEST(AuxLossDeath, ErrorsAreNamed) {
  Threads cpu(1);
  const std::vector<int32_t> ids = {0, 1, 4, 1};
  std::vector<int32_t> counts(4);
  EXPECT_DEATH(count_experts(cpu, view_of(ids, Shape{2, 2}), {},
                             view_of(counts, Shape{4})),
               "\\[aux_loss\\] expert id 4 of 4");
  EXPECT_DEATH(count_experts(cpu, view_of(ids, Shape{2, 2}), {},
                             view_of(counts, Shape{2, 2})),
               "counts are i32\\[2, 2\\] for 1 sequences");

  Buffer<float> logits({6, 4}), loss({1});
  logits.normal(1);
  const auto z = [&](std::vector<int32_t> starts) {
    const Shape shape{static_cast<int64_t>(starts.size())};
    z_loss_forward(cpu, logits.in(), {.sequence_S1 = view_of(starts, shape)},
                   loss.view());
  };
  EXPECT_DEATH(z({0, 2, 5}), "must run from 0 to 6");
  EXPECT_DEATH(z({1, 6}), "must run from 0 to 6");
  EXPECT_DEATH(z({0, 7, 6}), "must not fall");
  EXPECT_DEATH(
      balance_loss_forward(cpu, BalanceKind::kBiasedSigmoid, logits.in(), {},
                           view_of(counts, Shape{4}), {}, loss.view()),
      "\\[aux_loss\\] bias is f32\\[\\] for 4 experts");
}

}  // namespace
}  // namespace tapeline
