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

// Logits of ignored tokens stay poison: nothing may read them.
template <class T>
struct Problem {
  using A = Accumulator<T>;

  explicit Problem(const CrossEntropyCase& c)
      : tokens(c.tokens),
        vocabulary(c.vocabulary),
        labels(labels_of(c)),
        logits({tokens, vocabulary}, /*gap=*/3),
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
void agrees(const CrossEntropyCase& c) {
  Problem<T> p(c);
  const Expected expected = expected_of(p);
  p.forward();
  const Shape per_token{p.tokens};
  // A loss is a difference of numbers as large as the logits.
  for (int64_t t = 0; t < p.tokens; ++t) {
    const double u = std::is_same_v<T, double> ? 1e-13 : 1e-6;
    const double allowed = u * (1 + std::abs(expected.lse[t]));
    ASSERT_NEAR(p.loss.view()(t), expected.loss[t], allowed);
    ASSERT_NEAR(p.lse.view()(t), expected.lse[t], allowed);
  }
  p.backward();
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
  agrees<float>(GetParam());
}
TEST_P(CrossEntropyCases, Bf16AgreesWithTheDefinition) {
  agrees<bf16>(GetParam());
}
TEST_P(CrossEntropyCases, F64AgreesWithTheDefinition) {
  agrees<double>(GetParam());
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
void follows_torch(double tolerance) {
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
  p.forward();
  double loss = 0;
  for (double l : p.loss.values()) loss += l / 13;
  EXPECT_NEAR(loss, golden("ce.loss")[0], 1e-6);
  p.backward();
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
  follows_torch<float>(1e-8);
  follows_torch<double>(1e-8);   // the golden is rounded to f32
  follows_torch<bf16>(0x1p-12);  // half a step below 1 / 8; 1 / 13 is largest
}

TEST(CrossEntropy, IgnoredTokensGiveExactZerosWhateverTheyHold) {
  Problem<float> p({"", 4, 9, Labels::kNone, 1});
  p.forward();
  EXPECT_EQ(p.loss.values(), std::vector<double>(4, 0));
  EXPECT_EQ(p.lse.values(), std::vector<double>(4, 0));
  p.backward();
  EXPECT_EQ(p.logits.values(), std::vector<double>(36, 0));
}

TEST(CrossEntropy, WeightZeroGivesExactZeros) {
  Problem<float> p({"", 2, 3, Labels::kAll, 1});
  p.logits.set({1, 2, 3, kNan, kInf, 0});
  p.weight.set({1, 0});
  p.forward();
  p.backward();
  for (int v = 0; v < 3; ++v) {
    EXPECT_NE(p.logits.view()(0, v), 0);
    EXPECT_EQ(p.logits.view()(1, v), 0);
  }
}

// Forward of one token with label 1, then backward with weight 1.
std::vector<double> one_token(const std::vector<double>& logits, double* loss) {
  const int64_t n = static_cast<int64_t>(logits.size());
  Problem<float> p({"", 1, n, Labels::kAll, 1});
  p.labels = {1};
  p.logits.set(logits);
  p.weight.set({1});
  p.forward();
  p.backward();
  *loss = p.loss.values()[0];
  return p.logits.values();
}

TEST(CrossEntropy, MinusInfinityHasProbabilityZero) {
  double loss;
  const std::vector<double> d = one_token({-kInf, 0, 0, -kInf}, &loss);
  EXPECT_FLOAT_EQ(loss, std::log(2.0f));
  EXPECT_EQ(d[0], 0);
  EXPECT_NEAR(d[1], -0.5, 1e-7);
  EXPECT_NEAR(d[2], 0.5, 1e-7);
  EXPECT_EQ(d[3], 0);
}

TEST(CrossEntropy, LogitsAtTheEndsOfTheRangeStayFinite) {
  double loss;
  const std::vector<double> d = one_token({-3e38, 3e38, 3e38}, &loss);
  // ln 2 is far below one step of the largest logit.
  EXPECT_EQ(loss, 0);
  for (double v : d) EXPECT_TRUE(std::isfinite(v));
  one_token({3e38, -3e38}, &loss);
  EXPECT_EQ(loss, kInf);  // 6e38 is no float
}

TEST(CrossEntropy, AnOverflowIsNeverHidden) {
  for (const std::vector<double>& logits : {std::vector<double>{kInf, 0, 0},
                                            {0, kInf, 0},
                                            {kNan, 0, 0},
                                            {0, kNan, 0},
                                            {-kInf, -kInf, -kInf},
                                            {kNan, -kInf, -kInf}}) {
    double loss;
    one_token(logits, &loss);
    EXPECT_FALSE(std::isfinite(loss)) << logits[0] << " " << logits[1];
  }
}

TEST(CrossEntropy, ThreadsDoNotChangeABit) {
  const Problem<bf16> start({"", 203, 257, Labels::kSome, 2});
  Problem<bf16> p = start;
  const auto reset = [&] { p = start; };
  const auto run = [&](Launch l) {
    p.forward(l);
    p.backward(l);
  };
  EXPECT_TRUE(SameForAnyThreads(p.loss, reset, run));
  EXPECT_TRUE(SameForAnyThreads(p.logits, reset, run));
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
  }
}

}  // namespace
}  // namespace tapeline
