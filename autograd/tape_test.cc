#include "autograd/tape.h"

#include "autograd/test_ops.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

using test_ops::factor;
using test_ops::parameter;
using test_ops::pass;
using test_ops::plus;
using test_ops::times;
using test_ops::values;
using test_ops::weigh;
using Floats = std::vector<float>;

Floats floats(const Tensor& x) { return x.to_vector<float>(); }
Tensor ones(int64_t n) { return Tensor::full({n}, DType::kF32, 1); }

// --- The sweep

TEST(Tape, GoesBackInReverseProgramOrder) {
  std::vector<std::string> log;
  const auto logged = [&](const Tensor& x, const char* name) {
    return pass(x, name, [&log, name](Backward&) { log.push_back(name); });
  };
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  // d depends on a alone; c is made after it.
  const Tensor y = record(tape, [&] {
    const Tensor a = logged(x, "a");
    const Tensor b = logged(a, "b");
    const Tensor d = logged(a, "d");
    const Tensor c = logged(b, "c");
    return plus(c, d);
  });
  ParameterGradients grads;
  EXPECT_EQ(floats(tape.backward(y, grads)[0]), Floats{2});
  EXPECT_EQ(log, (std::vector<std::string>{"c", "d", "b", "a"}));
}

TEST(Tape, SkipsNodesThatNoGradientReaches) {
  int runs = 0;
  const auto counted = [&](const Tensor& x) {
    return pass(x, "counted", [&](Backward&) { ++runs; });
  };
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const Tensor unused = tape.input(values<float>({1}));
  Tensor y;
  record(tape, [&] {
    y = counted(x);
    counted(counted(x));  // a dead end
    counted(unused);
  });
  ParameterGradients grads;
  const std::vector<Tensor> dx = tape.backward(y, grads);
  EXPECT_EQ(runs, 1);
  EXPECT_TRUE(dx[0]);
  EXPECT_FALSE(dx[1]);
  EXPECT_EQ(tape.nodes(), 0);
}

TEST(Tape, SeedsSeveralOutputs) {
  Tape tape;
  const Tensor x = tape.input(values<float>({1, 1}));
  Tensor a, b;
  record(tape, [&] {
    a = factor(x, 2);
    b = factor(a, 3);
  });
  ParameterGradients grads;
  // a gets 10 of its own and 3 * 1 through b; a second seed of b adds up.
  const std::vector<Tensor> dx = tape.backward(
      {{b, ones(2)}, {a, values<float>({10, 20})}, {b, ones(2)}}, grads);
  EXPECT_EQ(floats(dx[0]), (Floats{32, 52}));
}

TEST(Tape, ReturnsASeedOfAnInputItself) {
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  ParameterGradients grads;
  EXPECT_EQ(floats(tape.backward({{x, values<float>({4})}}, grads)[0]),
            Floats{4});
}

// --- Accumulation

TEST(Tape, AddsGradientsOfATensorUsedThreeTimes) {
  Tape tape;
  const Tensor x = tape.input(values<float>({3, -2}));
  const Tensor y = record(tape, [&] {
    return plus(times(x, x), plus(factor(x, 5), pass(x)));  // x^2 + 6 x
  });
  ParameterGradients grads;
  EXPECT_EQ(floats(tape.backward({{y, ones(2)}}, grads)[0]), (Floats{12, 2}));
}

TEST(Tape, TakesOneTensorTwiceInOneOp) {
  Tape tape;
  const Tensor x = tape.input(values<float>({3}));
  const Tensor y = record(tape, [&] { return plus(x, x); });
  ParameterGradients grads;
  EXPECT_EQ(floats(tape.backward(y, grads)[0]), Floats{2});
}

// In bf16 1 and 2 below 256 are kept, 256 + 1 rounds to 256 (ties to even). A
// sum in fp32, rounded once, would be 258 for either order.
TEST(Tape, RoundsToBf16AfterEachAdditionInReverseProgramOrder) {
  const auto gradient = [](std::vector<double> factors) {
    Tape tape;
    const Tensor x = tape.input(Tensor::full({1}, DType::kBf16, 1));
    const Tensor y = record(tape, [&] {
      const Tensor a = factor(x, factors[0]);
      const Tensor b = factor(x, factors[1]);
      const Tensor c = factor(x, factors[2]);
      return plus(plus(a, b), c);
    });
    ParameterGradients grads;
    return static_cast<float>(tape.backward(y, grads)[0].to_vector<bf16>()[0]);
  };
  EXPECT_EQ(gradient({256, 1, 1}), 258.0f);  // 1 + 1, + 256
  EXPECT_EQ(gradient({1, 256, 1}), 256.0f);  // 1 + 256 -> 256, + 1 -> 256
  EXPECT_EQ(gradient({1, 1, 256}), 256.0f);  // 256 + 1 -> 256, + 1 -> 256
}

// plus() gives both inputs one tensor. If a later addition wrote into it, the
// other input and the caller's seed would change.
TEST(Tape, NeverAddsIntoAGradientThatOthersHold) {
  Tape tape;
  const Tensor a = tape.input(values<float>({1}));
  const Tensor b = tape.input(values<float>({1}));
  const Tensor seed = values<float>({1});
  const Tensor y = record(tape, [&] {
    const Tensor b2 = factor(b, 10);  // adds to b after plus has
    const Tensor a2 = factor(a, 100);
    return plus(plus(a, b), plus(a2, b2));
  });
  ParameterGradients grads;
  const std::vector<Tensor> dx = tape.backward({{y, seed}}, grads);
  EXPECT_EQ(floats(dx[0]), Floats{101});
  EXPECT_EQ(floats(dx[1]), Floats{11});
  EXPECT_EQ(floats(seed), Floats{1});
}

TEST(Tape, AddsInPlaceWhereNobodyElseHoldsTheGradient) {
  Device device(1);
  const DeviceScope scope(device);
  Tape tape;
  const Tensor x = tape.input(Tensor::full({1 << 16}, DType::kF32, 1));
  const Tensor y = record(tape, [&] {
    Tensor sum = factor(x, 1);
    for (int i = 0; i < 10; ++i) sum = plus(sum, factor(x, 1));
    return sum;
  });
  ParameterGradients grads;
  const Seed seed{y, Tensor::full({1 << 16}, DType::kF32, 1)};
  device.pool().reset_peak();
  const int64_t before = device.pool().stats().live;
  const std::vector<Tensor> dx = tape.backward({seed}, grads);
  EXPECT_EQ(floats(dx[0])[5], 11);
  // The running sum and one new contribution: no third for their sum.
  EXPECT_LE(device.pool().stats().peak - before, 2 * (4 << 16));
}

TEST(Tape, GivesNodesContiguousGradients) {
  struct WideNode : Node {
    void backward_inputs(Backward& b) override {
      b.add(0, Tensor::full({2, 3}, DType::kF32, 7).slice(1, 0, 1));
    }
  };
  bool contiguous = false;
  Tape tape;
  const Tensor x = tape.input(Tensor::zeros({2, 1}, DType::kF32));
  const Tensor y = record(tape, [&] {
    const Tensor a = pass(
        x, "pass", [&](Backward& b) { contiguous = b.grad().contiguous(); });
    Tensor out = a.clone();
    push<WideNode>("wide", {&a}, {&out});
    return out;
  });
  ParameterGradients grads;
  const auto dx =
      tape.backward({{y, Tensor::zeros({2, 1}, DType::kF32)}}, grads);
  EXPECT_TRUE(contiguous);
  EXPECT_TRUE(dx[0].contiguous());
  EXPECT_EQ(floats(dx[0]), (Floats{7, 7}));
}

// --- Modes

TEST(Tape, RecordsOnlyWhereAGradientIsWanted) {
  Tape tape;
  record(tape, [&] {
    const Tensor constant = values<float>({1});
    EXPECT_FALSE(pass(constant).requires_grad);
  });
  EXPECT_EQ(tape.nodes(), 0);
}

TEST(Tape, RecordsNothingInOffMode) {
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  record(tape, [&] {
    const GradModeScope off(GradMode::kOff);
    const Tensor y = pass(x);
    EXPECT_FALSE(y.requires_grad);
    EXPECT_EQ(y.tape, 0u);
  });
  EXPECT_EQ(tape.nodes(), 0);
}

TEST(Tape, ComputesWithoutATapeAsInOffMode) {
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  EXPECT_FALSE(pass(x).requires_grad);
}

// An op with a float, an int and a byte output.
struct ChooseNode : Node {
  void backward_inputs(Backward& b) override { b.add(0, b.grad(0)); }
};
std::vector<Tensor> choose(const Tensor& x) {
  std::vector<Tensor> out = {x.clone(), Tensor::zeros({1}, DType::kI32),
                             Tensor::zeros({1}, DType::kU8)};
  push<ChooseNode>("choose", {&x}, {&out[0], &out[1], &out[2]});
  return out;
}

TEST(Tape, ShadowModeMarksFloatsAndRecordsNothing) {
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  record(tape, [&] {
    const GradModeScope shadow(GradMode::kShadow);
    const std::vector<Tensor> out = choose(x);
    EXPECT_TRUE(out[0].requires_grad);
    EXPECT_FALSE(out[1].requires_grad);
    EXPECT_FALSE(out[2].requires_grad);
    EXPECT_EQ(out[0].tape, 0u);
    // Bits propagate from what is marked, parameters included.
    EXPECT_TRUE(pass(out[0]).requires_grad);
    EXPECT_FALSE(pass(values<float>({1})).requires_grad);
    const Parameter w = parameter("w", values<float>({1}));
    EXPECT_TRUE(weigh(values<float>({1}), w).requires_grad);
  });
  EXPECT_EQ(tape.nodes(), 0);
}

TEST(Tape, IntegersNeverRequireGrad) {
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  record(tape, [&] {
    const std::vector<Tensor> out = choose(x);
    EXPECT_TRUE(out[0].requires_grad);
    EXPECT_FALSE(out[1].requires_grad);
    EXPECT_FALSE(out[2].requires_grad);
    // An int made on a tape may be used anywhere.
    Tape other;
    record(other, [&] { EXPECT_FALSE(out[1].clone().requires_grad); });
  });
}

TEST(Tape, DetachedTensorsEndTheWayBack) {
  Tape tape;
  const Tensor x = tape.input(values<float>({3}));
  const Tensor y = record(tape, [&] { return times(x, pass(x).detach()); });
  ParameterGradients grads;
  EXPECT_EQ(floats(tape.backward(y, grads)[0]), Floats{3});
}

// --- Errors

TEST(TapeDeathTest, RunsBackwardOnce) {
  Tape tape("step 7");
  const Tensor x = tape.input(values<float>({1}));
  const Tensor y = record(tape, [&] { return pass(x); });
  ParameterGradients grads;
  tape.backward(y, grads);
  EXPECT_DEATH(tape.backward(y, grads),
               "tape 'step 7' was already run backward");
  EXPECT_DEATH(RecordScope scope(tape),
               "tape 'step 7' was already run backward");
  EXPECT_DEATH(tape.input(x), "tape 'step 7' was already run backward");
}

TEST(TapeDeathTest, WantsTheInputPartBeforeTheWeightPart) {
  Tape tape("early");
  const Tensor x = tape.input(values<float>({1}));
  const Tensor y = record(tape, [&] { return pass(x); });
  ParameterGradients grads;
  EXPECT_DEATH(tape.backward_weights(grads), "'early' before its");
  tape.backward(y, grads);
  EXPECT_DEATH(tape.backward_weights(grads), "'early' before its");
}

TEST(TapeDeathTest, NamesBothTapesOfAForeignTensor) {
  Tape one("micro-batch 1"), two("micro-batch 2");
  const Tensor x = one.input(values<float>({1}));
  const Tensor y = record(one, [&] { return pass(x); });
  EXPECT_DEATH(record(two, [&] { pass(y, "other"); }),
               "\\[other\\] a tensor of tape 'micro-batch 1' is used on tape "
               "'micro-batch 2': f32\\[1\\]");
  ParameterGradients grads;
  EXPECT_DEATH(two.backward(y, grads),
               "\\[backward\\] a tensor of tape 'micro-"
               "batch 1' is used on tape 'micro-");
}

TEST(TapeDeathTest, RefusesTensorsOfFinishedTapesAndOfShadowMode) {
  Tensor old;
  {
    Tape gone("gone");
    const Tensor x = gone.input(values<float>({1}));
    old = record(gone, [&] { return pass(x); });
  }
  Tape tape("now");
  EXPECT_DEATH(record(tape, [&] { pass(old); }),
               "a tensor of a finished tape is used on tape 'now'");
  const Tensor shadow = [&] {
    const GradModeScope scope(GradMode::kShadow);
    return pass(old);
  }();
  EXPECT_DEATH(record(tape, [&] { pass(shadow); }),
               "a tensor of no tape \\(made in Shadow mode\\) is used on");
}

TEST(TapeDeathTest, RefusesSeedsThatDoNotFit) {
  Tape tape;
  const Tensor x = tape.input(values<float>({1, 2}));
  const Tensor y = record(tape, [&] { return pass(x); });
  ParameterGradients grads;
  EXPECT_DEATH(tape.backward(y, grads), "a loss is one number, got f32\\[2\\]");
  EXPECT_DEATH(tape.backward({{y, values<float>({1})}}, grads),
               "backward from f32\\[2\\] with a gradient that is f32\\[1\\]");
  EXPECT_DEATH(tape.backward({{y, values<double>({1, 1})}}, grads),
               "f32\\[2\\] with a gradient that is f64\\[2\\]");
  EXPECT_DEATH(tape.backward({{y, Tensor()}}, grads), "that is undefined");
  EXPECT_DEATH(tape.backward({{values<float>({1}), values<float>({1})}}, grads),
               "requires no gradient");
  EXPECT_DEATH(tape.input(Tensor::zeros({2}, DType::kI32)),
               "\\[input\\] no gradient exists for i32\\[2\\]");
}

TEST(TapeDeathTest, RefusesGradientsThatDisagree) {
  struct WrongNode : Node {
    void backward_inputs(Backward& b) override {
      b.add(0, Tensor::zeros({3}, DType::kF32));
    }
  };
  Tape tape;
  const Tensor x = tape.input(values<float>({1, 2}));
  Tensor a, b;
  record(tape, [&] {
    a = x.clone();
    push<WrongNode>("wrong", {&x}, {&a});
    b = pass(x);
  });
  ParameterGradients grads;
  EXPECT_DEATH(tape.backward({{a, ones(2)}, {b, ones(2)}}, grads),
               "gradients of one tensor differ: f32\\[2\\] and f32\\[3\\]");
}

TEST(TapeDeathTest, OutlivesItsRecording) {
  EXPECT_DEATH(
      {
        auto tape = std::make_unique<Tape>("short");
        const RecordScope scope(*tape);
        tape.reset();
      },
      "tape 'short' ends while it records");
}

}  // namespace
}  // namespace tapeline
