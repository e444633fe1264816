#include "kernels/router/router.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/router/router_cases.h"
#include "runtime/safetensors.h"
#include "tests/support/buffer.h"
#include "tests/support/close.h"
#include "tests/support/finite_differences.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <class A>
struct Problem {
  explicit Problem(const RouterCase& c)
      : options(c.options),
        tokens(c.tokens),
        experts(c.experts),
        logits({tokens, experts}, /*gap=*/3),
        dweight({tokens, options.top_k}, 1) {
    logits.normal(1, 1.5f);
    dweight.normal(3);
    if (!c.biased) return;
    Buffer<A> draw({experts});
    draw.normal(2, 0.4f);
    for (double b : draw.values()) bias.push_back(A(b + c.bias_mean));
  }

  View<const A> bias_view() const {
    if (bias.empty()) return {};
    return view_of(bias, Shape{experts});
  }
  Buffer<int32_t> choose(Launch l = launch()) const {
    Buffer<int32_t> ids({tokens, options.top_k}, 2);
    router_choose(l, logits.in(), bias_view(), options, ids.view());
    EXPECT_TRUE(ids.guards_intact());
    return ids;
  }
  Buffer<A> weights(const Buffer<int32_t>& ids, Launch l = launch()) const {
    Buffer<A> w({tokens, options.top_k}, 2);
    router_weights(l, logits.in(), ids.in(), options, w.view());
    EXPECT_TRUE(w.guards_intact());
    return w;
  }
  Buffer<A> backward(const Buffer<int32_t>& ids, Launch l = launch()) const {
    Buffer<A> dlogits({tokens, experts}, 2);
    router_weights_backward(l, dweight.in(), logits.in(), ids.in(), options,
                            dlogits.view());
    EXPECT_TRUE(dlogits.guards_intact());
    return dlogits;
  }

  RouterOptions options;
  int64_t tokens, experts;
  Buffer<A> logits;
  std::vector<A> bias;
  Buffer<A> dweight;
};

// One token's scores and choice, in f64 and by ranks instead of selection.
template <class A>
std::vector<double> scores_of(const Problem<A>& p, int64_t t) {
  std::vector<double> s;
  double sum = 0;
  for (int64_t e = 0; e < p.experts; ++e) {
    s.push_back(std::exp(double(p.logits.view()(t, e))));
    sum += s.back();
  }
  const bool softmax = p.options.score == RouterOptions::kSoftmax;
  for (double& v : s) v = softmax ? v / sum : v / (1 + v);
  return s;
}

// How many beat the i-th: larger, or as large with a lower index.
int rank_of(const std::vector<double>& values, size_t i) {
  int rank = 0;
  for (size_t j = 0; j < values.size(); ++j) {
    rank += values[j] > values[i] || (values[j] == values[i] && j < i);
  }
  return rank;
}

template <class A>
std::vector<double> choice_of(const Problem<A>& p, int64_t t) {
  std::vector<double> ch = scores_of(p, t);
  for (size_t e = 0; e < p.bias.size(); ++e) ch[e] += double(p.bias[e]);
  const size_t groups = p.options.groups, size = ch.size() / groups;
  std::vector<double> group;
  for (size_t g = 0; g < groups; ++g) {
    double sum = 0;
    for (size_t e = g * size; e < (g + 1) * size; ++e) {
      int better = 0;
      for (size_t f = g * size; f < (g + 1) * size; ++f) {
        better += ch[f] > ch[e] || (ch[f] == ch[e] && f < e);
      }
      if (better < 2) sum += ch[e];
    }
    group.push_back(sum);
  }
  for (size_t e = 0; e < ch.size(); ++e) {
    if (rank_of(group, e / size) >= p.options.top_groups) ch[e] = -kInf;
  }
  return ch;
}

class RouterCases : public testing::TestWithParam<RouterCase> {};
INSTANTIATE_TEST_SUITE_P(, RouterCases, testing::ValuesIn(router_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(RouterCases, ChoosesTheBestInDescendingOrder) {
  const Problem<double> p(GetParam());
  const Buffer<int32_t> ids = p.choose();
  for (int64_t t = 0; t < p.tokens; ++t) {
    const std::vector<double> ch = choice_of(p, t);
    for (int k = 0; k < p.options.top_k; ++k) {
      const int32_t e = ids.view()(t, k);
      ASSERT_GT(ch[e], -kInf);
      EXPECT_EQ(rank_of(ch, e), k) << "token " << t;
    }
  }
}

TEST_P(RouterCases, F32ChoosesTheSameUpToRounding) {
  const Problem<float> p(GetParam());
  const Buffer<int32_t> kept = p.choose();
  for (int64_t t = 0; t < p.tokens; ++t) {
    std::vector<double> ch = choice_of(p, t), sorted = ch;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    for (int k = 0; k < p.options.top_k; ++k) {
      EXPECT_NEAR(ch[kept.view()(t, k)], sorted[k], 1e-6);
      for (int j = 0; j < k; ++j) {
        EXPECT_NE(kept.view()(t, j), kept.view()(t, k));
      }
    }
  }
}

TEST_P(RouterCases, WeightsComeFromTheScoresWithoutBias) {
  const Problem<float> p(GetParam());
  const Buffer<int32_t> ids = p.choose();
  Buffer<double> expected({p.tokens, p.options.top_k});
  for (int64_t t = 0; t < p.tokens; ++t) {
    const std::vector<double> s = scores_of(p, t);
    double sum = 1e-20;
    for (int k = 0; k < p.options.top_k; ++k) sum += s[ids.view()(t, k)];
    for (int k = 0; k < p.options.top_k; ++k) {
      expected.view()(t, k) = s[ids.view()(t, k)] /
                              (p.options.normalize ? sum : 1) * p.options.scale;
    }
  }
  // exp, a quotient and a product: a few roundings on the way.
  EXPECT_TRUE(Close(p.weights(ids).in(), expected.in(),
                    {.sum_length = p.experts, .scale = 2}));
}

TEST_P(RouterCases, BackwardIsTheDerivativeOfTheWeights) {
  RouterCase c = GetParam();
  c.tokens = std::min<int64_t>(c.tokens, c.experts > 300 ? 1 : 3);
  Problem<double> p(c);
  Buffer<int32_t> ids = p.choose();
  if (p.tokens > 1) ids.view()(1, 0) = -1;
  const auto loss = [&] { return inner_product(p.weights(ids), p.dweight); };
  EXPECT_TRUE(
      Close(p.backward(ids).values(), numeric_gradient(p.logits, loss)));
}

TEST_P(RouterCases, F32BackwardAgreesWithF64) {
  // The inputs are on the bf16 grid: the same in both.
  const Problem<float> p(GetParam());
  const Problem<double> q(GetParam());
  const Buffer<int32_t> ids = p.choose();
  const std::vector<double> got = p.backward(ids).values();
  const std::vector<double> expected = q.backward(ids).values();
  // A normalized weight's gradient is a difference of terms of size
  // scale * dweight, which may cancel entirely (one expert): their rounding
  // counts, not the result's.
  const double allowed = 1e-6 * p.options.scale;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], expected[i], allowed) << "at " << i;
  }
}

std::vector<double> golden(const std::string& name) {
  static const auto file =
      SafetensorsReader::open("tests/data/ops/misc.safetensors");
  CHECK(file.ok()) << file.status();
  const Tensor tensor = file->read_tensor(name).value();
  if (tensor.dtype() == DType::kI32) {
    const std::vector<int32_t> ids = tensor.to_vector<int32_t>();
    return {ids.begin(), ids.end()};
  }
  const std::vector<float> values = tensor.to_vector<float>();
  return {values.begin(), values.end()};
}

// Computed by torch in f64; "router1" without groups, "router_grp" with.
class RouterGolden : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(, RouterGolden,
                         testing::Values("router1", "router_grp"),
                         [](const auto& info) { return info.param; });

template <class A>
void follows_torch(const std::string& name, double tolerance) {
  RouterCase c = {"", 32, 16, true, 0, {.top_k = 4, .scale = 2.5}};
  if (name == "router_grp") c.options.groups = 4, c.options.top_groups = 2;
  Problem<A> p(c);
  p.logits.set(golden(name + ".logits"));
  p.dweight.set(golden(name + ".dweights"));
  p.bias.clear();
  for (double b : golden(name + ".bias")) p.bias.push_back(A(b));
  const Buffer<int32_t> ids = p.choose();
  EXPECT_EQ(ids.values(), golden(name + ".ids"));
  const std::vector<double> weights = p.weights(ids).values();
  const std::vector<double> dlogits = p.backward(ids).values();
  const std::vector<double> w = golden(name + ".weights");
  const std::vector<double> d = golden(name + ".dlogits");
  for (size_t i = 0; i < w.size(); ++i)
    EXPECT_NEAR(weights[i], w[i], tolerance);
  for (size_t i = 0; i < d.size(); ++i)
    EXPECT_NEAR(dlogits[i], d[i], tolerance);
}

TEST_P(RouterGolden, FollowsTorch) {
  follows_torch<float>(GetParam(), 1e-6);
  follows_torch<double>(GetParam(), 1e-7);  // the golden is rounded to f32
}

RouterCase simple(int64_t tokens, int64_t experts, int top_k) {
  return {"",    tokens, experts,
          false, 0,      {.score = RouterOptions::kSigmoid, .top_k = top_k}};
}

// Ids of one token whose logits are given.
template <class A>
std::vector<int32_t> chosen(const std::vector<double>& logits,
                            RouterOptions options) {
  Problem<A> p({"", 1, static_cast<int64_t>(logits.size()), false, 0, options});
  p.logits.set(logits);
  const Buffer<int32_t> ids = p.choose();
  return {&ids.view()(0, 0), &ids.view()(0, 0) + options.top_k};
}

using Ids = std::vector<int32_t>;

TEST(Router, TiesGoToTheLowerExpert) {
  EXPECT_EQ(chosen<float>({1, 1, 1, 1, 1}, {.top_k = 3}), (Ids{0, 1, 2}));
  EXPECT_EQ(chosen<float>({0, 2, 1, 2, 1}, {.top_k = 4}), (Ids{1, 3, 2, 4}));
  // Groups tie as well: the first two are kept.
  EXPECT_EQ(chosen<float>({1, 1, 1, 1, 1, 1},
                          {.top_k = 3, .groups = 3, .top_groups = 2}),
            (Ids{0, 1, 2}));
}

TEST(Router, AGroupScoresItsTwoLargest) {
  // Group 0 has the best expert, group 1 the best pair, group 2 the best sum of
  // three.
  EXPECT_EQ(chosen<double>({3, -9, -9, 2, 2, -9, 1, 1, 1},
                           {.top_k = 2, .groups = 3, .top_groups = 1}),
            (Ids{3, 4}));
}

TEST(Router, BiasMovesTheChoiceButNotTheWeights) {
  Problem<float> p(simple(1, 3, 1));
  p.logits.set({2, 1, 0});
  p.bias = {0, 1, 0};
  p.options.normalize = false;
  const Buffer<int32_t> ids = p.choose();
  EXPECT_EQ(ids.view()(0, 0), 1);
  EXPECT_FLOAT_EQ(p.weights(ids).view()(0, 0), 1 / (1 + std::exp(-1.0f)));
}

TEST(Router, NanIsChosenLast) {
  const RouterOptions three = {.top_k = 3};
  EXPECT_EQ(chosen<float>({kNan, 1, 2, kNan, 3}, three), (Ids{4, 2, 1}));
  EXPECT_EQ(chosen<float>({kNan, -kInf, kNan, kInf}, three), (Ids{3, 1, 0}));
  EXPECT_EQ(chosen<float>({kNan, kNan, kNan, kNan}, three), (Ids{0, 1, 2}));
  EXPECT_EQ(chosen<float>({1, kNan, 3},
                          {.score = RouterOptions::kSoftmax, .top_k = 2}),
            (Ids{0, 1}));
}

TEST(Router, GroupsOfNanAreDroppedFirst) {
  const RouterOptions options = {.top_k = 3, .groups = 3, .top_groups = 2};
  EXPECT_EQ(chosen<float>({kNan, kNan, -5, -6, -7, -8}, options),
            (Ids{2, 3, 4}));
  // Fewer numbers than slots in the kept groups: dropped experts before NaN.
  EXPECT_EQ(chosen<float>({kNan, 1, kNan, kNan, kNan, 0}, options),
            (Ids{1, 4, 5}));
}

TEST(Router, AnyBitsGiveDistinctIdsInRange) {
  std::mt19937 random(5);
  const std::vector<double> odd = {kNan, kInf, -kInf, 0, -0.0, 1e30, -1e30, 1};
  for (auto score : {RouterOptions::kSigmoid, RouterOptions::kSoftmax}) {
    for (int round = 0; round < 300; ++round) {
      std::vector<double> logits(12);
      for (double& v : logits) v = odd[random() % odd.size()];
      const Ids ids = chosen<float>(
          logits, {.score = score, .top_k = 7, .groups = 4, .top_groups = 2});
      EXPECT_EQ(std::set<int32_t>(ids.begin(), ids.end()).size(), 7u);
      for (int32_t e : ids) EXPECT_TRUE(e >= 0 && e < 12) << e;
    }
  }
}

TEST(Router, ScoresThatAllUnderflowWeighZeroAndHaveZeroGradient) {
  Problem<float> p(simple(1, 4, 2));
  p.logits.set({-200, -300, -200, -400});
  const Buffer<int32_t> ids = p.choose();
  EXPECT_EQ(p.weights(ids).values(), (std::vector<double>{0, 0}));
  EXPECT_EQ(p.backward(ids).values(), (std::vector<double>{0, 0, 0, 0}));
}

TEST(Router, UnroutedSlotsWeighNothing) {
  Problem<float> p(simple(1, 4, 3));
  Buffer<int32_t> ids({1, 3});
  ids.set({2, -1, 0});
  const std::vector<double> w = p.weights(ids).values();
  EXPECT_EQ(w[1], 0);
  EXPECT_NEAR(w[0] + w[2], 1, 1e-6);
  p.dweight.view()(0, 1) = static_cast<float>(kNan);
  const std::vector<double> dlogits = p.backward(ids).values();
  EXPECT_GT(std::abs(dlogits[2]), 1e-3);  // false for NaN
  EXPECT_EQ(dlogits[1], 0);
  EXPECT_EQ(dlogits[3], 0);
}

TEST(Router, ThreadsDoNotChangeABit) {
  const Problem<float> p(
      {"",
       333,
       64,
       true,
       0,
       {.top_k = 6, .groups = 8, .top_groups = 3, .scale = 2.5}});
  Buffer<int32_t> ids({1});
  Buffer<float> out({1});
  EXPECT_TRUE(SameForAnyThreads(ids, [&](Launch l) { ids = p.choose(l); }));
  EXPECT_TRUE(
      SameForAnyThreads(out, [&](Launch l) { out = p.weights(ids, l); }));
  EXPECT_TRUE(
      SameForAnyThreads(out, [&](Launch l) { out = p.backward(ids, l); }));
}

TEST(RouterDeath, ErrorsAreNamed) {
  const Problem<float> p(simple(2, 4, 2));
  Buffer<int32_t> ids({2, 2});
  ids.set({0, 1, 4, 1});
  // On the CPU: a device's ids are not the host's to read.
  Threads threads(1);
  EXPECT_DEATH(p.weights(ids, threads), "\\[router\\] expert id 4 of 4");
  EXPECT_DEATH(p.weights(Buffer<int32_t>({2, 3})), "ids are i32\\[2, 3\\]");
  Problem<float> groups = p;
  groups.options.groups = 3;
  EXPECT_DEATH(groups.choose(), "1 of 3 groups of 4 experts");
}

}  // namespace
}  // namespace tapeline
