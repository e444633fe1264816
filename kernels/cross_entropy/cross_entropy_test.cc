#include "kernels/cross_entropy/cross_entropy.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cross_entropy/cross_entropy_cases.h"
#include "runtime/safetensors.h"
#include "tests/support/buffer.h"
#include "tests/support/close.h"
#include "tests/support/finite_differences.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Forward, then backward; or both in one call.
enum class Way { kApart, kTogether };
constexpr Way kWays[] = {Way::kApart, Way::kTogether};

// Logits of ignored tokens stay poison: nothing may read them.
template <class T>
struct Problem {
  using A = Accumulator<T>;

  explicit Problem(const CrossEntropyCase& c)
      : tokens(c.tokens),
        vocabulary(c.vocabulary),
        labels(labels_of(c)),
        logits({tokens, vocabulary}, c.gap),
        weight({tokens}),
        loss({tokens}),
        lse({tokens}) {
    Buffer<T> values({tokens, vocabulary});
    values.normal(1, c.spread);
    for (int64_t t = 0; t < tokens; ++t) {
      if (labels[t] == kIgnoredLabel) continue;
      for (int64_t v = 0; v < vocabulary; ++v) {
        logits.view()(t, v) = values.view()(t, v);
      }
    }
    weight.normal(2);
    for (int64_t t = 0; t < tokens; ++t) {
      if (labels[t] == kIgnoredLabel) weight.view()(t) = A(kNan);
    }
  }
  View<const int32_t> labels_view() const {
    return view_of(labels, Shape{tokens});
  }
  void forward(Launch l = launch()) {
    cross_entropy_forward(l, logits.in(), labels_view(), loss.view(),
                          lse.view());
    EXPECT_TRUE(logits.guards_intact());
    EXPECT_TRUE(loss.guards_intact());
    EXPECT_TRUE(lse.guards_intact());
  }
  void backward(Launch l = launch()) {
    cross_entropy_backward(l, logits.view(), labels_view(), lse.in(),
                           weight.in());
    EXPECT_TRUE(logits.guards_intact());
  }
  void run(Way way, Launch l = launch()) {
    if (way == Way::kApart) {
      forward(l);
      backward(l);
      return;
    }
    cross_entropy_forward_backward(l, logits.view(), labels_view(), weight.in(),
                                   loss.view(), lse.view());
    EXPECT_TRUE(logits.guards_intact());
    EXPECT_TRUE(loss.guards_intact());
    EXPECT_TRUE(lse.guards_intact());
  }

  int64_t tokens, vocabulary;
  std::vector<int32_t> labels;
  Buffer<T> logits;
  Buffer<A> weight, loss, lse;
};

struct Expected {
  std::vector<double> loss, lse, dlogits;
};

// Straight from the definition, in f64.
template <class T>
Expected expected_of(const Problem<T>& p) {
  Expected out;
  for (int64_t t = 0; t < p.tokens; ++t) {
    const bool ignored = p.labels[t] == kIgnoredLabel;
    double max = -kInf, sum = 0;
    for (int64_t v = 0; !ignored && v < p.vocabulary; ++v) {
      max = std::max(max, double(p.logits.view()(t, v)));
    }
    for (int64_t v = 0; !ignored && v < p.vocabulary; ++v) {
      sum += std::exp(double(p.logits.view()(t, v)) - max);
    }
    const double lse = ignored ? 0 : max + std::log(sum);
    out.lse.push_back(lse);
    out.loss.push_back(ignored ? 0
                               : lse - double(p.logits.view()(t, p.labels[t])));
    for (int64_t v = 0; v < p.vocabulary; ++v) {
      double d = 0;
      if (!ignored) {
        d = std::exp(double(p.logits.view()(t, v)) - lse);
        d = double(p.weight.view()(t)) * (d - (v == p.labels[t]));
      }
      out.dlogits.push_back(d);
    }
  }
  return out;
}

template <class T>
void agrees(const CrossEntropyCase& c, Way way) {
  Problem<T> p(c);
  const Expected expected = expected_of(p);
  p.run(way);
  const Shape per_token{p.tokens};
  // A loss is a difference of numbers as large as the logits.
  for (int64_t t = 0; t < p.tokens; ++t) {
    const double u = std::is_same_v<T, double> ? 1e-13 : 1e-6;
    const double allowed = u * (1 + std::abs(expected.lse[t]));
    ASSERT_NEAR(p.loss.view()(t), expected.loss[t], allowed);
    ASSERT_NEAR(p.lse.view()(t), expected.lse[t], allowed);
  }
  const Shape shape{p.tokens, p.vocabulary};
  // An error of lse is a relative error of every probability.
  const double scale = 2 + c.spread;
  EXPECT_TRUE(Close(p.logits.in(), view_of(expected.dlogits, shape),
                    {.sum_length = p.vocabulary, .scale = scale}));
}

class CrossEntropyCases : public testing::TestWithParam<CrossEntropyCase> {};
INSTANTIATE_TEST_SUITE_P(, CrossEntropyCases,
                         testing::ValuesIn(cross_entropy_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(CrossEntropyCases, F32AgreesWithTheDefinition) {
  for (Way way : kWays) agrees<float>(GetParam(), way);
}
TEST_P(CrossEntropyCases, Bf16AgreesWithTheDefinition) {
  for (Way way : kWays) agrees<bf16>(GetParam(), way);
}
TEST_P(CrossEntropyCases, F64AgreesWithTheDefinition) {
  for (Way way : kWays) agrees<double>(GetParam(), way);
}

// A checkpoint's first run has the loss of forward, its replay that of both.
template <class T>
void together_is_apart(const CrossEntropyCase& c) {
  Problem<T> apart(c), together(c);
  apart.run(Way::kApart);
  together.run(Way::kTogether);
  EXPECT_TRUE(Bitwise(together.loss.in(), apart.loss.in()));
  EXPECT_TRUE(Bitwise(together.lse.in(), apart.lse.in()));
  EXPECT_TRUE(Bitwise(together.logits.in(), apart.logits.in()));
}

TEST_P(CrossEntropyCases, TogetherHasTheBitsOfForwardThenBackward) {
  together_is_apart<float>(GetParam());
  together_is_apart<bf16>(GetParam());
  together_is_apart<double>(GetParam());
}

template <class T>
void scales(const CrossEntropyCase& c) {
  using A = Accumulator<T>;
  Problem<T> p(c);
  p.logits.normal(3, c.spread);
  const auto scale_by = [&](double by) {
    Buffer<A> factor({1});
    factor.set({by});
    cross_entropy_scale(launch(), p.logits.view(), factor.in());
    EXPECT_TRUE(p.logits.guards_intact());
  };
  Buffer<T> expected = p.logits;
  scale_by(1);
  EXPECT_TRUE(Bitwise(p.logits.in(), expected.in()));
  std::vector<double> products = p.logits.values();
  for (double& v : products) v = double(A(v) * A(0.3f));
  expected.set(products);
  scale_by(0.3f);
  EXPECT_TRUE(Bitwise(p.logits.in(), expected.in()));
}

TEST_P(CrossEntropyCases, ScaleMultipliesAndRoundsOnceOrLeavesAllAsItIs) {
  scales<float>(GetParam());
  scales<bf16>(GetParam());
  scales<double>(GetParam());
}

TEST(CrossEntropy, BackwardIsTheDerivativeOfForward) {
  Problem<double> p({"", 5, 13, Labels::kAll, 1});
  const auto loss = [&] {
    p.forward();
    return inner_product(p.loss, p.weight);
  };
  const auto expected = numeric_gradient(p.logits, loss);
  p.forward();
  p.backward();
  EXPECT_TRUE(Close(p.logits.values(), expected));
}

// Torch's mean over the valid labels, in f64; labels 0, 5 and 15 are ignored.
template <class T>
void follows_torch(double tolerance, Way way) {
  const auto file = SafetensorsReader::open("tests/data/ops/misc.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  const auto golden = [&](const char* name) {
    const auto values = file->read_tensor(name)->to_vector<float>();
    return std::vector<double>(values.begin(), values.end());
  };
  Problem<T> p({"", 16, 96, Labels::kAll, 1});
  p.labels = file->read_tensor("ce.labels")->to_vector<int32_t>();
  p.logits.set(golden("ce.logits"));
  std::vector<double> weight;
  for (int32_t label : p.labels) {
    weight.push_back(label == kIgnoredLabel ? 0 : 1.0 / 13);
  }
  p.weight.set(weight);
  p.run(way);
  double loss = 0;
  for (double l : p.loss.values()) loss += l / 13;
  EXPECT_NEAR(loss, golden("ce.loss")[0], 1e-6);
  const std::vector<double> got = p.logits.values();
  const std::vector<double> expected = golden("ce.dlogits");
  for (size_t i = 0; i < got.size(); ++i) {
    // An exponential is right to two roundings of T, whoever computes it.
    const double rounding =
        std::numeric_limits<T>::epsilon() * std::abs(expected[i]);
    ASSERT_NEAR(got[i], expected[i], tolerance + 2 * rounding) << i;
  }
}

TEST(CrossEntropy, FollowsTorch) {
  for (Way way : kWays) {
    follows_torch<float>(1e-8, way);
    follows_torch<double>(1e-8, way);  // the golden is rounded to f32
    // Half a step below 1 / 8; 1 / 13 is largest.
    follows_torch<bf16>(0x1p-12, way);
  }
}

TEST(CrossEntropy, IgnoredTokensGiveExactZerosWhateverTheyHold) {
  for (Way way : kWays) {
    Problem<float> p({"", 4, 9, Labels::kNone, 1});
    p.run(way);
    EXPECT_EQ(p.loss.values(), std::vector<double>(4, 0));
    EXPECT_EQ(p.lse.values(), std::vector<double>(4, 0));
    EXPECT_EQ(p.logits.values(), std::vector<double>(36, 0));
  }
}

TEST(CrossEntropy, WeightZeroGivesExactZeros) {
  for (Way way : kWays) {
    Problem<float> p({"", 2, 3, Labels::kAll, 1});
    p.logits.set({1, 2, 3, kNan, kInf, 0});
    p.weight.set({1, 0});
    p.run(way);
    for (int v = 0; v < 3; ++v) {
      EXPECT_NE(p.logits.view()(0, v), 0);
      EXPECT_EQ(p.logits.view()(1, v), 0);
    }
  }
}

// Rows that are long enough for a kernel of their own.
TEST(CrossEntropy, LongRowsHideNothingAndMoveNothing) {
  constexpr int64_t kV = 151936;
  Problem<bf16> p({"", 6, kV, Labels::kAll, 1, /*gap=*/0});
  p.labels = {kIgnoredLabel, 5, 5, 5, 5, 9};
  std::vector<double> logits(6 * kV, 0);
  for (int64_t v = 0; v < kV; ++v) logits[v] = kNan;
  logits[1 * kV + 77] = kInf;
  logits[2 * kV + kV - 1] = kNan;
  logits[3 * kV + 4] = kNan;  // of weight 0
  for (int64_t v = 0; v < kV; ++v) logits[4 * kV + v] = -kInf;
  for (int64_t v = 0; v < kV; ++v) logits[5 * kV + v] = v == 9 ? 0 : -kInf;
  p.logits.set(logits);
  p.weight.set({kNan, 1, 1, 0, 1, 1});
  p.run(Way::kTogether);
  EXPECT_EQ(p.loss.values()[0], 0);
  EXPECT_EQ(p.lse.values()[0], 0);
  for (int t : {1, 2, 3, 4}) {
    EXPECT_FALSE(std::isfinite(p.loss.values()[t])) << t;
  }
  // Probability 1 at the label: no loss and no gradient.
  EXPECT_EQ(p.loss.values()[5], 0);
  const std::vector<double> d = p.logits.values();
  for (int t : {0, 3, 5}) {
    for (int64_t v = 0; v < kV; ++v) ASSERT_EQ(d[t * kV + v], 0) << t;
  }
}

// One token with label 1 and weight 1.
std::vector<double> one_token(const std::vector<double>& logits, double* loss,
                              Way way) {
  const int64_t n = static_cast<int64_t>(logits.size());
  Problem<float> p({"", 1, n, Labels::kAll, 1});
  p.labels = {1};
  p.logits.set(logits);
  p.weight.set({1});
  p.run(way);
  *loss = p.loss.values()[0];
  return p.logits.values();
}

TEST(CrossEntropy, MinusInfinityHasProbabilityZero) {
  for (Way way : kWays) {
    double loss;
    const std::vector<double> d = one_token({-kInf, 0, 0, -kInf}, &loss, way);
    EXPECT_FLOAT_EQ(loss, std::log(2.0f));
    EXPECT_EQ(d[0], 0);
    EXPECT_NEAR(d[1], -0.5, 1e-7);
    EXPECT_NEAR(d[2], 0.5, 1e-7);
    EXPECT_EQ(d[3], 0);
  }
}

TEST(CrossEntropy, LogitsAtTheEndsOfTheRangeStayFinite) {
  for (Way way : kWays) {
    double loss;
    const std::vector<double> d = one_token({-3e38, 3e38, 3e38}, &loss, way);
    // ln 2 is far below one step of the largest logit.
    EXPECT_EQ(loss, 0);
    for (double v : d) EXPECT_TRUE(std::isfinite(v));
    one_token({3e38, -3e38}, &loss, way);
    EXPECT_EQ(loss, kInf);  // 6e38 is no float
  }
}

TEST(CrossEntropy, AnOverflowIsNeverHidden) {
  for (const std::vector<double>& logits : {std::vector<double>{kInf, 0, 0},
                                            {0, kInf, 0},
                                            {kNan, 0, 0},
                                            {0, kNan, 0},
                                            {-kInf, -kInf, -kInf},
                                            {kNan, -kInf, -kInf}}) {
    for (Way way : kWays) {
      double loss;
      one_token(logits, &loss, way);
      EXPECT_FALSE(std::isfinite(loss)) << logits[0] << " " << logits[1];
    }
  }
}

TEST(CrossEntropy, ThreadsDoNotChangeABit) {
  const Problem<bf16> start({"", 203, 257, Labels::kSome, 2});
  Problem<bf16> p = start;
  const auto reset = [&] { p = start; };
  for (Way way : kWays) {
    const auto run = [&](Launch l) { p.run(way, l); };
    EXPECT_TRUE(SameForAnyThreads(p.loss, reset, run));
    EXPECT_TRUE(SameForAnyThreads(p.logits, reset, run));
  }
}

// On the CPU: elsewhere the host cannot read labels.
TEST(CrossEntropyDeath, LabelsOutsideOfTheVocabularyAreErrors) {
  Threads cpu(1);
  for (int32_t bad : {9, -1, -99, -101}) {
    Problem<float> p({"", 2, 9, Labels::kAll, 1});
    p.labels[1] = bad;
    const std::string message =
        "\\[cross_entropy\\] label " + std::to_string(bad) + " of token 1";
    EXPECT_DEATH(p.forward(cpu), message);
    EXPECT_DEATH(p.backward(cpu), message);
    EXPECT_DEATH(p.run(Way::kTogether, cpu), message);
  }
}

}  // namespace
}  // namespace tapeline
