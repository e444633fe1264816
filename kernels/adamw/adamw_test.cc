#include "kernels/adamw/adamw.h"

#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/adamw/adamw_cases.h"
#include "runtime/safetensors.h"
#include "tests/support/buffer.h"
#include "tests/support/close.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

template <class A>
struct State {
  explicit State(int64_t n) : param({n}), grad({n}), m({n}), v({n}) {
    param.normal(1);
    grad.normal(2);
    m.normal(3);
    std::vector<double> squares = m.values();
    for (double& s : squares) s *= 1.5 * s;
    v.set(squares);
  }
  void step(const AdamWOptions& options, Launch l = launch()) {
    adamw(l, param.view(), grad.in(), m.view(), v.view(), options);
    for (const auto* b : {&param, &m, &v}) EXPECT_TRUE(b->guards_intact());
  }
  Buffer<A> param, grad, m, v;
};

class AdamWCases : public testing::TestWithParam<AdamWCase> {};
INSTANTIATE_TEST_SUITE_P(, AdamWCases, testing::ValuesIn(adamw_cases()),
                         [](const auto& info) { return info.param.name; });

// One element by the textbook's formula, in f64.
struct Element {
  double param, m, v;
};
Element expected(Element x, double grad, const AdamWOptions& o) {
  const double g = o.gradient_scale * grad;
  const double m = o.beta1 * x.m + (1 - o.beta1) * g;
  const double v = o.beta2 * x.v + (1 - o.beta2) * g * g;
  const double m_hat = m / (1 - std::pow(o.beta1, o.step));
  const double v_hat = v / (1 - std::pow(o.beta2, o.step));
  const double update =
      m_hat / (std::sqrt(v_hat) + o.eps) + o.weight_decay * x.param;
  return {x.param - o.lr * update, m, v};
}

template <class A>
void agrees(const AdamWCase& c) {
  State<A> got(c.elements);
  std::vector<double> param, m, v;
  for (int64_t i = 0; i < c.elements; ++i) {
    const Element e =
        expected({got.param.values()[i], got.m.values()[i], got.v.values()[i]},
                 got.grad.values()[i], c.options);
    param.push_back(e.param);
    m.push_back(e.m);
    v.push_back(e.v);
  }
  got.step(c.options);
  const Shape shape{c.elements};
  const Tolerance tolerance = {.scale = 2};
  EXPECT_TRUE(
      Close(got.param.in(), view_of(std::as_const(param), shape), tolerance));
  EXPECT_TRUE(Close(got.m.in(), view_of(std::as_const(m), shape), tolerance));
  EXPECT_TRUE(Close(got.v.in(), view_of(std::as_const(v), shape), tolerance));
}

TEST_P(AdamWCases, F32AgreesWithTheDefinition) {
  if (GetParam().elements < 1000) agrees<float>(GetParam());
}
TEST_P(AdamWCases, F64AgreesWithTheDefinition) {
  if (GetParam().elements < 1000) agrees<double>(GetParam());
}

// Every element alone gives what it gives among the others: no vector tail and
// no chunk is special.
TEST_P(AdamWCases, ElementsDoNotDependOnTheirPlace) {
  const AdamWCase& c = GetParam();
  State<float> all(c.elements);
  const State<float> start = all;
  all.step(c.options);
  for (int64_t i = 0; i < c.elements; i += c.elements < 1000 ? 1 : 97) {
    State<float> one = start;
    const auto slice = [i](Buffer<float>& b) {
      return b.view().slice(0, i, i + 1);
    };
    adamw(launch(), slice(one.param), View<const float>(slice(one.grad)),
          slice(one.m), slice(one.v), c.options);
    ASSERT_EQ(one.param.view()(i), all.param.view()(i)) << i;
    ASSERT_EQ(one.m.view()(i), all.m.view()(i)) << i;
    ASSERT_EQ(one.v.view()(i), all.v.view()(i)) << i;
  }
}

TEST(AdamW, FollowsNumpyForFourSteps) {
  const auto file =
      SafetensorsReader::open("kernels/adamw/testdata/adamw.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  const auto golden = [&](const std::string& name) {
    return file->read_tensor(name)->to_vector<double>();
  };
  const std::vector<double> grads = golden("grads");
  State<double> x(53);
  State<float> y(53);
  x.param.set(golden("param"));
  y.param.set(golden("param"));
  for (Buffer<double>* b : {&x.m, &x.v}) b->set(std::vector<double>(53));
  for (Buffer<float>* b : {&y.m, &y.v}) b->set(std::vector<double>(53));
  for (int64_t t = 1; t <= 4; ++t) {
    const AdamWOptions options = {.lr = 3e-3,
                                  .beta1 = 0.9,
                                  .beta2 = 0.95,
                                  .eps = 1e-8,
                                  .weight_decay = 0.1,
                                  .step = t,
                                  .gradient_scale = 0.7};
    const std::vector<double> g(grads.begin() + (t - 1) * 53,
                                grads.begin() + t * 53);
    x.grad.set(g);
    y.grad.set(g);
    x.step(options);
    y.step(options);
    std::string suffix = ".";
    suffix += std::to_string(t);
    EXPECT_TRUE(Close(x.param.values(), golden("param" + suffix)));
    EXPECT_TRUE(Close(x.m.values(), golden("m" + suffix)));
    EXPECT_TRUE(Close(x.v.values(), golden("v" + suffix)));
    const std::vector<double> param = golden("param" + suffix);
    for (int i = 0; i < 53; ++i) {
      EXPECT_NEAR(y.param.view()(i), param[i], 1e-6) << i;
    }
  }
}

TEST(AdamW, DecayShrinksParametersWithoutAGradient) {
  State<double> x(2);
  x.param.set({2, -4});
  for (Buffer<double>* b : {&x.grad, &x.m, &x.v}) b->set({0, 0});
  x.step({.lr = 0.5, .weight_decay = 0.5});
  EXPECT_EQ(x.param.values(), (std::vector<double>{1.5, -3}));
  EXPECT_EQ(x.m.values(), (std::vector<double>{0, 0}));
}

TEST(AdamW, FirstStepMovesByTheLearningRateWhateverTheGradientsSize) {
  State<float> x(3);
  x.param.set({0, 0, 0});
  x.grad.set({1e-4, -7, 1e10});
  for (Buffer<float>* b : {&x.m, &x.v}) b->set({0, 0, 0});
  x.step({.lr = 0.25});
  EXPECT_NEAR(x.param.view()(0), -0.25, 1e-4);
  EXPECT_NEAR(x.param.view()(1), 0.25, 1e-6);
  EXPECT_NEAR(x.param.view()(2), -0.25, 1e-6);
}

TEST(AdamW, ThreadsDoNotChangeABit) {
  const State<float> start(200000);
  State<float> x = start;
  EXPECT_TRUE(SameForAnyThreads(
      x.param, [&] { x = start; },
      [&](Launch l) { x.step({.lr = 1e-3, .weight_decay = 0.1}, l); }));
}

TEST(AdamW, ReadsTheClipFactorWhereItRuns) {
  const State<float> start(37);
  State<float> direct = start, read = start, stopped = start;
  Buffer<double> clip({1});
  clip.set({0.375});
  direct.step({.lr = 0.01, .gradient_scale = 0.75});
  read.step({.lr = 0.01, .gradient_scale = 2, .clip_1 = clip.in()});
  clip.set({std::nan("")});
  stopped.step({.lr = 0.01, .clip_1 = clip.in()});
  for (const auto member :
       {&State<float>::param, &State<float>::m, &State<float>::v}) {
    EXPECT_TRUE(Bitwise((read.*member).in(), (direct.*member).in()));
    EXPECT_TRUE(Bitwise((stopped.*member).in(), (start.*member).in()));
  }
}

TEST(AdamWDeath, ErrorsAreNamed) {
  State<float> x(4), y(5);
  EXPECT_DEATH(x.step({.step = 0}), "steps count from 1");
  EXPECT_DEATH(
      adamw(launch(), x.param.view(), y.grad.in(), x.m.view(), x.v.view(), {}),
      "param is f32\\[4\\], grad is f32\\[5\\]");
}

}  // namespace
}  // namespace tapeline
