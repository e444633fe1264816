// Parameters, the I and W parts, and several tapes or backwards.
#include <sstream>
#include <stdexcept>

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

// --- Parameters

TEST(Tape, ReachesParametersWithoutDifferentiableInputs) {
  Tape tape;
  const Parameter w = parameter("w", values<float>({2}));
  const Tensor y = record(tape, [&] { return weigh(values<float>({5}), w); });
  EXPECT_TRUE(y.requires_grad);
  ParameterGradients grads;
  EXPECT_TRUE(tape.backward(y, grads).empty());
  EXPECT_EQ(floats(grads.combined(w)), Floats{5});
}

TEST(Tape, FrozenParametersGetNoWeightPart) {
  struct CountedNode : test_ops::WeighNode {
    int* runs = nullptr;
    void backward_weights(Backward& b) override {
      ++*runs;
      test_ops::WeighNode::backward_weights(b);
    }
  };
  for (const bool trainable : {true, false}) {
    for (const bool split : {true, false}) {
      int runs = 0;
      Tape tape;
      Parameter w = parameter("w", values<float>({2}));
      w.set_trainable(trainable);
      const Tensor x = tape.input(values<float>({5}));
      const Tensor y = record(tape, [&] {
        Tensor out = test_ops::product_of(x, w.value());
        auto* n = push<CountedNode>("counted", {&x}, {&out}, {&w});
        n->runs = &runs;
        n->w = ParameterUse(w);
        n->x.save(x);
        return out;
      });
      ParameterGradients grads;
      std::vector<Tensor> dx;
      if (split) {
        dx = tape.backward_inputs({{y, ones(1)}}, grads);
        tape.backward_weights(grads);
      } else {
        dx = tape.backward(y, grads);
      }
      EXPECT_EQ(floats(dx[0]), Floats{2});
      EXPECT_EQ(runs, trainable ? 1 : 0);
      EXPECT_EQ(grads.reached(w), trainable);
    }
  }
}

TEST(Tape, FreezingAllMakesNothingRecorded) {
  Tape tape;
  Parameter w = parameter("w", values<float>({2}));
  w.set_trainable(false);
  record(tape,
         [&] { EXPECT_FALSE(weigh(values<float>({5}), w).requires_grad); });
  EXPECT_EQ(tape.nodes(), 0);
}

// w is used at sites 0 and 1 with gradients 1e8, 1 and -1e8. In fp32 the result
// tells which were added first: per site, then site 0 + site 1.
TEST(Tape, AddsATiedParametersSitesInSiteOrder) {
  const auto gradient = [](const std::vector<std::pair<int, float>>& uses) {
    Tape tape;
    const Parameter w = parameter("w", values<float>({1}));
    const Tensor y = record(tape, [&] {
      Tensor sum = values<float>({0});
      for (const auto& [site, x] : uses) {
        const UseSite scope(site);
        sum = plus(sum, weigh(values<float>({x}), w));
      }
      return sum;
    });
    ParameterGradients grads;
    tape.backward(y, grads);
    return floats(grads.combined(w))[0];
  };
  // Site 0 sums to 0, so the 1 of site 1 survives, whatever the program order.
  EXPECT_EQ(gradient({{0, 1e8f}, {1, 1}, {0, -1e8f}}), 1);
  EXPECT_EQ(gradient({{1, 1}, {0, 1e8f}, {0, -1e8f}}), 1);
  EXPECT_EQ(gradient({{0, -1e8f}, {0, 1e8f}, {1, 1}}), 1);
  // At one site, reverse program order: 1 is lost beside the 1e8 it meets.
  EXPECT_EQ(gradient({{0, 1e8f}, {0, 1}, {0, -1e8f}}), 0);
  EXPECT_EQ(gradient({{0, 1}, {0, 1e8f}, {0, -1e8f}}), 1);
}

// --- I and W

TEST(Tape, InputPartThenWeightPartGiveTheBitsOfBoth) {
  const Parameter w = parameter("w", values<float>({1.1f, -0.7f}));
  const Parameter v = parameter("v", values<float>({0.3f, 2.9f}));
  const auto model = [&](const Tensor& x) {
    const Tensor a = weigh(times(x, x), w);
    const Tensor b = weigh(plus(a, factor(x, 0.37)), v);
    return plus(weigh(b, w), times(a, b));
  };
  const Seed none;
  Tape both, parts;
  ParameterGradients whole, split;
  const Tensor x = values<float>({0.123f, -4.56f});
  const Tensor seed = values<float>({0.77f, 1.31f});
  const Tensor in1 = both.input(x), in2 = parts.input(x);
  const Tensor y1 = record(both, [&] { return model(in1); });
  const Tensor y2 = record(parts, [&] { return model(in2); });
  const std::vector<Tensor> dx1 = both.backward({{y1, seed}}, whole);
  const std::vector<Tensor> dx2 = parts.backward_inputs({{y2, seed}}, split);
  EXPECT_EQ(floats(dx1[0]), floats(dx2[0]));
  EXPECT_FALSE(split.reached(w));
  EXPECT_FALSE(split.reached(v));
  parts.backward_weights(split);
  for (const Parameter& p : {w, v}) {
    EXPECT_EQ(floats(whole.combined(p)), floats(split.combined(p)));
  }
}

TEST(Tape, KeepsBetweenIAndWOnlyWhatWNeeds) {
  const Parameter w = parameter("w", values<float>({2}));
  Tape tape;
  const Tensor x = tape.input(values<float>({3}));
  const Tensor y = record(
      tape, [&] { return times(weigh(factor(x, 2), w), values<float>({5})); });
  EXPECT_EQ(tape.nodes(), 3);
  ParameterGradients grads;
  tape.backward_inputs({{y, ones(1)}}, grads);
  EXPECT_EQ(tape.nodes(), 1);
  tape.backward_weights(grads);
  EXPECT_EQ(tape.nodes(), 0);
  EXPECT_EQ(floats(grads.combined(w)), Floats{30});
}

TEST(Tape, WeightPartsOfUnreachedNodesDoNothing) {
  const Parameter w = parameter("w", values<float>({2}));
  const Parameter unused = parameter("unused", values<float>({2}));
  Tape tape;
  const Tensor x = tape.input(values<float>({3}));
  Tensor y;
  record(tape, [&] {
    y = weigh(x, w);
    weigh(x, unused);
  });
  ParameterGradients grads;
  tape.backward_inputs({{y, ones(1)}}, grads);
  tape.backward_weights(grads);
  EXPECT_TRUE(grads.reached(w));
  EXPECT_FALSE(grads.reached(unused));
}

// What a thrown exception left undone is not made up for by W.
TEST(TapeDeathTest, WeightPartsDoNotFollowInputsThatThrew) {
  const Parameter w = parameter("w", values<float>({2}));
  Tape tape;
  const Tensor x = tape.input(values<float>({3}));
  const Tensor y = record(tape, [&] {
    const auto fails = [](Backward&) { throw std::runtime_error("fails"); };
    return weigh(pass(weigh(x, w), "pass", fails), w);
  });
  ParameterGradients grads;
  EXPECT_THROW(tape.backward_inputs({{y, ones(1)}}, grads), std::runtime_error);
  EXPECT_DEATH(tape.backward_weights(grads), "before its backward_inputs");
}

TEST(TapeDeathTest, ARetainedTapeRunsBothParts) {
  Tape tape;
  const Tensor x = tape.input(values<float>({3}));
  const Tensor y = record(tape, [&] { return factor(x, 2); });
  ParameterGradients grads;
  EXPECT_DEATH(
      tape.backward({{y, ones(1)}}, grads, Retain::kYes, Parts::kInputs),
      "a retained tape runs I and W together");
  EXPECT_DEATH(
      tape.backward({{y, ones(1)}}, grads, Retain::kNo, Parts::kWeights),
      "W follows I");
}

// --- Several tapes, several backwards

TEST(Tape, TwoInFlightDoNotMixInEitherOrder) {
  const Parameter w = parameter("w", values<float>({3}));
  for (const bool ascending : {true, false}) {
    Tape tapes[2] = {Tape("zero"), Tape("one")};
    Tensor y[2];
    for (int i = 0; i < 2; ++i) {
      const Tensor x = tapes[i].input(values<float>({i + 2.0f}));
      y[i] = record(tapes[i], [&] { return times(weigh(x, w), x); });
    }
    ParameterGradients grads;
    for (const int i : ascending ? std::vector{0, 1} : std::vector{1, 0}) {
      // y = w x^2
      EXPECT_EQ(floats(tapes[i].backward(y[i], grads)[0]),
                Floats{2 * 3 * (i + 2.0f)});
    }
    EXPECT_EQ(floats(grads.combined(w)), Floats{4 + 9});
  }
}

TEST(Tape, MayRecordOneTapeInsideAnother) {
  Tape outer("outer"), inner("inner");
  const Tensor x = outer.input(values<float>({3}));
  const RecordScope scope(outer);
  const Tensor a = factor(x, 2);
  Tensor dz;
  {
    const Tensor z = inner.input(values<float>({5}));
    const Tensor y = record(inner, [&] { return times(z, a.detach()); });
    ParameterGradients grads;
    dz = inner.backward(y, grads)[0];
  }
  EXPECT_EQ(floats(dz), Floats{6});
  EXPECT_EQ(factor(a, 2).tape, outer.id());
}

TEST(Tape, RecordReturnsTheValueAndItsTape) {
  const Parameter w = parameter("w", values<float>({2}));
  auto [y, tape] = record([&] { return weigh(values<float>({5}), w); });
  EXPECT_EQ(y.tape, tape.id());
  ParameterGradients grads;
  tape.backward(y, grads);
  EXPECT_EQ(floats(grads.combined(w)), Floats{5});
}

TEST(Tape, RetainedBackwardsAddUp) {
  const Parameter w = parameter("w", values<float>({2}));
  Tape tape;
  const Tensor x = tape.input(values<float>({5}));
  const Tensor y = record(tape, [&] { return times(weigh(x, w), x); });
  ParameterGradients grads;
  EXPECT_EQ(floats(tape.backward(y, grads, Retain::kYes)[0]), Floats{20});
  EXPECT_EQ(floats(grads.combined(w)), Floats{25});
  EXPECT_EQ(floats(tape.backward(y, grads, Retain::kYes)[0]), Floats{20});
  EXPECT_EQ(floats(grads.combined(w)), Floats{50});
  EXPECT_EQ(tape.nodes(), 2);
  EXPECT_EQ(floats(tape.backward(y, grads)[0]), Floats{20});
  EXPECT_EQ(floats(grads.combined(w)), Floats{75});
  EXPECT_EQ(tape.nodes(), 0);
}

TEST(Tape, PrintsANodePerLine) {
  const Parameter w = parameter("w", values<float>({2, 3}));
  Tape tape;
  const Tensor x = tape.input(values<float>({5, 6}));
  record(tape, [&] {
    const LayerScope layer("layers", 0);
    return times(weigh(x, w), x);
  });
  std::ostringstream out;
  tape.print(out);
  EXPECT_EQ(out.str(),
            "0  weigh  layers.0  [2]  saved 8 bytes, by none\n"
            "1  times  layers.0  [2]  saved 16 bytes, by none\n");
}

}  // namespace
}  // namespace tapeline
