#include "autograd/gradcheck.h"

#include <algorithm>

#include "autograd/test_ops.h"

namespace tapeline {
namespace {

using test_ops::parameter;
using test_ops::plus;
using test_ops::times;
using test_ops::values;
using test_ops::weigh;

Tensor x3() { return values<double>({0.5, -1.25, 2}); }

TEST(Gradcheck, AcceptsRightGradientsOfInputsAndParameters) {
  const Parameter w = parameter("w", values<double>({1.5, -0.5, 0.75}));
  const Gradcheck check(
      {.inputs = {x3(), values<double>({3, 0.25, -2})},
       .parameters = {w},
       .f = [&](const std::vector<Tensor>& in) -> std::vector<Tensor> {
         const Tensor y = weigh(times(in[0], in[1]), w);
         return {y, plus(y, times(in[0], in[0]))};
       }});
  EXPECT_TRUE(check.gradients_match());
  std::vector<Contribution> caught;
  EXPECT_TRUE(check.errors_are_caught(&caught));
  std::vector<std::string> names;
  for (const Contribution& c : caught) names.push_back(to_string(c));
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{
                       "plus input 0", "plus input 1", "times input 0",
                       "times input 0", "times input 1", "times input 1",
                       "weigh input 0", "weigh parameter 0"}));
}

TEST(Gradcheck, MovesStridedInputsAndLeavesTheirNeighbours) {
  const Tensor wide =
      Tensor::from(std::vector<double>{1, 2, 3, 4, 5, 6}, {2, 3});
  const Tensor inner = wide.slice(1, 1, 3);
  const Gradcheck check(
      {.inputs = {inner},
       .f = [](const std::vector<Tensor>& in) -> std::vector<Tensor> {
         return {times(in[0], in[0])};
       }});
  EXPECT_TRUE(check.gradients_match());
  EXPECT_EQ(wide.to_vector<double>(), (std::vector<double>{1, 2, 3, 4, 5, 6}));
}

// y = x with a backward that is wrong in one way.
enum class Fault {
  kNone,
  kReversed,  // the right sum, in the wrong elements
  kNothing,   // no gradient
  kOnlyOnce,  // the second of two retained backwards gives nothing
  kNaN,
};
struct FaultyNode : Node {
  Fault fault = Fault::kNone;
  int runs = 0;
  void backward_inputs(Backward& b) override {
    std::vector<double> dx = b.grad().to_vector<double>();
    if (fault == Fault::kReversed) std::reverse(dx.begin(), dx.end());
    if (fault == Fault::kNothing) return;
    if (fault == Fault::kOnlyOnce && runs++ > 0) return;
    if (fault == Fault::kNaN) dx[1] = std::nan("");
    b.add(0, Tensor::from(dx, b.grad().shape()));
  }
};
Gradcheck check_of(Fault fault) {
  return Gradcheck(
      {.inputs = {x3()},
       .f = [fault](const std::vector<Tensor>& in) -> std::vector<Tensor> {
         Tensor y = in[0].clone();
         if (auto* n = push<FaultyNode>("faulty", {&in[0]}, {&y})) {
           n->fault = fault;
         }
         return {y};
       }});
}

TEST(Gradcheck, RefusesWrongMissingAndUnrepeatableGradients) {
  EXPECT_TRUE(check_of(Fault::kNone).gradients_match());
  for (const Fault fault :
       {Fault::kReversed, Fault::kNothing, Fault::kOnlyOnce, Fault::kNaN}) {
    EXPECT_FALSE(check_of(fault).gradients_match()) << static_cast<int>(fault);
  }
}

TEST(Gradcheck, WantsAllGradientsToFlowSomewhere) {
  EXPECT_FALSE(check_of(Fault::kNothing).errors_are_caught());
}

// y = x w, with a W part that is wrong or in the wrong place.
enum class WeightFault { kNone, kInInputs, kTwice };
struct FaultyWeightNode : test_ops::WeighNode {
  WeightFault fault = WeightFault::kNone;
  void backward_inputs(Backward& b) override {
    test_ops::WeighNode::backward_inputs(b);
    if (fault == WeightFault::kInInputs) {
      test_ops::WeighNode::backward_weights(b);
    }
  }
  void backward_weights(Backward& b) override {
    if (fault == WeightFault::kInInputs) return;
    test_ops::WeighNode::backward_weights(b);
    if (fault == WeightFault::kTwice) {
      test_ops::WeighNode::backward_weights(b);
    }
  }
};
testing::AssertionResult weights_match(WeightFault fault) {
  const Parameter w = parameter("w", values<double>({1.5, -0.5, 0.75}));
  return Gradcheck(
             {.inputs = {x3()},
              .parameters = {w},
              .f = [&](const std::vector<Tensor>& in) -> std::vector<Tensor> {
                Tensor y = test_ops::product_of(in[0], w.value());
                if (auto* n = push<FaultyWeightNode>("faulty", {&in[0]}, {&y},
                                                     {&w})) {
                  n->fault = fault;
                  n->w = ParameterUse(w);
                  n->x.save(in[0]);
                }
                return {y};
              }})
      .gradients_match();
}

TEST(Gradcheck, RefusesWeightGradientsInTheWrongPartOrAmount) {
  EXPECT_TRUE(weights_match(WeightFault::kNone));
  EXPECT_FALSE(weights_match(WeightFault::kInInputs));
  EXPECT_FALSE(weights_match(WeightFault::kTwice));
}

}  // namespace
}  // namespace tapeline
