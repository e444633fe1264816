#include "autograd/anomaly.h"

#include <cmath>
#include <limits>

#include "autograd/test_ops.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

using test_ops::parameter;
using test_ops::pass;
using test_ops::plus;
using test_ops::values;
using test_ops::weigh;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// y = x with one element replaced, in forward or in backward.
struct PoisonNode : Node {
  float gradient;
  void backward_inputs(Backward& b) override {
    std::vector<float> dx = b.grad().to_vector<float>();
    if (!std::isfinite(gradient)) dx[1] = gradient;
    b.add(0, values<float>(dx));
  }
};
Tensor poison(const Tensor& x, float forward, float backward) {
  std::vector<float> out = x.to_vector<float>();
  if (!std::isfinite(forward)) out[1] = forward;
  Tensor y = values<float>(out);
  if (auto* n = push<PoisonNode>("poison", {&x}, {&y})) n->gradient = backward;
  return y;
}

// Six layers, a poison in layer 3 or nowhere.
Tensor layers(Tensor x, float forward, float backward) {
  for (int i = 0; i < 6; ++i) {
    const LayerScope layer("layers", i);
    const LayerScope mlp("mlp");
    x = i == 3 ? poison(x, forward, backward) : pass(x);
  }
  return x;
}

std::optional<Anomaly> run(float forward, float backward) {
  const AnomalyScope scope;
  Tape tape;
  const Tensor x = tape.input(values<float>({1, 2, 3}));
  const Tensor y = record(tape, [&] { return layers(x, forward, backward); });
  ParameterGradients grads;
  tape.backward({{y, values<float>({1, 1, 1})}}, grads);
  return scope.first();
}

TEST(Anomaly, FindsNothingInFiniteRuns) { EXPECT_FALSE(run(0, 0)); }

TEST(Anomaly, NamesOpLayerAndPhaseOfTheFirstNaNInForward) {
  const std::optional<Anomaly> first = run(kNaN, kInf);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->op, "poison");
  EXPECT_EQ(first->layer, "layers.3.mlp");
  EXPECT_EQ(first->phase, "forward");
  EXPECT_EQ(first->tensor, 0);
  EXPECT_EQ(first->element, 1);
  EXPECT_EQ(first->value, "nan");
  EXPECT_EQ(to_string(*first),
            "nan in forward of poison at layers.3.mlp, tensor 0, element 1");
}

TEST(Anomaly, NamesOpLayerAndPhaseOfTheFirstInfinityInBackward) {
  const std::optional<Anomaly> first = run(0, -kInf);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->op, "poison");
  EXPECT_EQ(first->layer, "layers.3.mlp");
  EXPECT_EQ(first->phase, "backward");
  EXPECT_EQ(first->tensor, 0);
  EXPECT_EQ(first->element, 1);
  EXPECT_EQ(first->value, "-inf");
}

TEST(Anomaly, FindsWeightGradientsThatOverflow) {
  const AnomalyScope scope;
  const Parameter w = parameter("w", values<float>({1e-30f}));
  Tape tape;
  const Tensor x = tape.input(values<float>({1e30f}));
  const Tensor y = record(tape, [&] {
    const LayerScope layer("head");
    return weigh(x, w);
  });
  ParameterGradients grads;
  tape.backward({{y, values<float>({1e30f})}}, grads);
  ASSERT_TRUE(scope.first());
  EXPECT_EQ(to_string(*scope.first()),
            "inf in weight gradient of weigh at head, tensor 0, element 0");
}

TEST(Anomaly, FindsWeightGradientsOfALaterWeightPart) {
  const AnomalyScope scope;
  const Parameter w = parameter("w", values<float>({1e-30f}));
  Tape tape;
  const Tensor x = tape.input(values<float>({1e30f}));
  const Tensor y = record(tape, [&] { return weigh(x, w); });
  ParameterGradients grads;
  tape.backward_inputs({{y, values<float>({1e30f})}}, grads);
  EXPECT_FALSE(scope.first());
  tape.backward_weights(grads);
  ASSERT_TRUE(scope.first());
  EXPECT_EQ(scope.first()->phase, "weight gradient");
}

TEST(Anomaly, SeesOpsThatAreNotRecorded) {
  const AnomalyScope scope;
  pass(values<float>({1, kNaN}), "sample");
  ASSERT_TRUE(scope.first());
  EXPECT_EQ(scope.first()->op, "sample");
  EXPECT_EQ(scope.first()->layer, "");
}

TEST(Anomaly, FindsOverflowOfASumInTheOpThatUsesIt) {
  const AnomalyScope scope;
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  // Both gradients of the inner tensor are finite, their sum is not.
  const Tensor y = record(tape, [&] {
    const Tensor inner = pass(x, "inner");
    return plus(pass(inner, "left"), pass(inner, "right"));
  });
  ParameterGradients grads;
  tape.backward({{y, values<float>({3e38f})}}, grads);
  ASSERT_TRUE(scope.first());
  EXPECT_EQ(scope.first()->op, "inner");
  EXPECT_EQ(scope.first()->phase, "backward");
}

TEST(Anomaly, ScopesNestAndEnd) {
  {
    const AnomalyScope outer;
    {
      const AnomalyScope inner;
      pass(values<float>({kNaN}));
      EXPECT_TRUE(inner.first());
    }
    EXPECT_FALSE(outer.first());
  }
  pass(values<float>({kNaN}));
}

// y = x; the gradient is one column of a wider tensor.
struct ColumnNode : Node {
  Tensor wide;
  void backward_inputs(Backward& b) override { b.add(0, wide.slice(1, 0, 1)); }
};
std::optional<Anomaly> column_anomaly(const std::vector<float>& wide) {
  const AnomalyScope scope;
  Tape tape;
  const Tensor x = tape.input(Tensor::zeros({3, 1}, DType::kF32));
  const Tensor y = record(tape, [&] {
    Tensor out = x.clone();
    push<ColumnNode>("column", {&x}, {&out})->wide = Tensor::from(wide, {3, 2});
    return out;
  });
  ParameterGradients grads;
  tape.backward({{y, Tensor::zeros({3, 1}, DType::kF32)}}, grads);
  return scope.first();
}

TEST(Anomaly, ChecksStridedGradientsAndNotWhatLiesBetween) {
  EXPECT_FALSE(column_anomaly({1, kNaN, 2, kInf, 3, kNaN}));
  const std::optional<Anomaly> first = column_anomaly({1, 0, 2, 0, kInf, 0});
  ASSERT_TRUE(first);
  EXPECT_EQ(first->element, 2);
}

}  // namespace
}  // namespace tapeline
