// Ways in which other systems' checkpoints go wrong, by the numbers of
// docs/checkpoint_and_offload.md; checkpoint_test.cc has more of them.
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "autograd/anomaly.h"
#include "autograd/checkpoint.h"
#include "autograd/small_stack.h"
#include "autograd/tape.h"
#include "autograd/test_ops.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

using test_ops::factor;
using test_ops::on_small_stack;
using test_ops::plus;
using test_ops::values;

// Replays nest no deeper than checkpoints do, and neither does freeing them.
TEST(Bug, B09_ManyCheckpointsInARowNeedNoDeepStack) {
  auto block = [](const Tensor& x) { return factor(x, 1.0); };
  const int64_t nodes = live_nodes();
  for (const bool goes_back : {true, false}) {
    auto tape = std::make_unique<Tape>();
    std::vector<float> dx;
    on_small_stack([&] {
      const Tensor x = tape->input(values<float>({2}));
      const Tensor loss = record(*tape, [&] {
        Tensor h = x;
        for (int i = 0; i < 2000; ++i) h = checkpoint(true, block, h);
        return h;
      });
      EXPECT_EQ(live_nodes(), nodes + 2000);
      if (!goes_back) return;
      ParameterGradients grads;
      dx = tape->backward(loss, grads)[0].to_vector<float>();
    });
    EXPECT_EQ(dx, std::vector<float>(goes_back, 1));
    on_small_stack([&] { tape.reset(); });
    EXPECT_EQ(live_nodes(), nodes);
  }
}

// A replay runs its own ops and no others, when its turn has come.
TEST(Bug, B08_AReplayRunsNothingOfAnotherBranch) {
  std::vector<std::string> order;
  const auto logged = [&](const Tensor& x, const char* name) {
    return test_ops::pass(
        x, name, [&order, name](Backward&) { order.emplace_back(name); });
  };
  auto block = [&](const Tensor& x) {
    return logged(logged(x, "inside 1"), "inside 2");
  };
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const Tensor y = record(tape, [&] {
    const Tensor first = logged(x, "before");
    const Tensor a = checkpoint(true, block, first);
    const Tensor b = logged(first, "other branch");
    return plus(logged(a, "behind"), b);
  });
  ParameterGradients grads;
  EXPECT_EQ(tape.backward(y, grads)[0].to_vector<float>(),
            std::vector<float>{2});
  EXPECT_EQ(order,
            (std::vector<std::string>{"behind", "other branch", "inside 2",
                                      "inside 1", "before"}));
}

// B11: a long list of captures is found by a map; each gets its own gradient.
TEST(Bug, B11_ManyCapturesGetTheirGradients) {
  constexpr int kCaptures = 40;
  Tape tape;
  std::vector<Tensor> inputs, captured;
  for (int i = 0; i < kCaptures; ++i) {
    inputs.push_back(tape.input(values<float>({static_cast<float>(i)})));
  }
  auto block = [&](const Tensor& x) {
    Tensor y = x;
    for (int i = 0; i < kCaptures; ++i) {
      y = plus(y, factor(captured[static_cast<size_t>(i)], i + 1));
      // Every one once more, so that the list is searched.
      y = plus(y, captured[static_cast<size_t>(kCaptures - 1 - i)]);
    }
    return y;
  };
  const Tensor loss = record(tape, [&] {
    for (const Tensor& x : inputs) captured.push_back(factor(x, 2));
    return checkpoint(true, block, captured[3]);
  });
  ParameterGradients grads;
  for (const Retain retain : {Retain::kYes, Retain::kNo}) {
    const std::vector<Tensor> dx = tape.backward(loss, grads, retain);
    for (int i = 0; i < kCaptures; ++i) {
      EXPECT_EQ(dx[static_cast<size_t>(i)].to_vector<float>()[0],
                2.0f * static_cast<float>(i + 2 + (i == 3)))
          << i;
    }
  }
}

// What is first not finite in a replay is reported there.
TEST(Bug, B37_ANaNInAReplayIsReportedThere) {
  struct Block {
    int layer = 0;
    Tensor operator()(const Tensor& x) const {
      const LayerScope mlp("mlp");
      const bool bad = layer == 7 && phase() == Phase::kReplay;
      return factor(x, bad ? std::numeric_limits<double>::quiet_NaN() : 1.0);
    }
  };
  std::vector<Block> blocks;
  for (int i = 0; i < 10; ++i) blocks.push_back({i});
  const AnomalyScope anomaly;
  Tape tape;
  const Tensor x = tape.input(values<float>({1, 2}));
  const Tensor loss = record(tape, [&] {
    Tensor h = x;
    for (Block& block : blocks) {
      const LayerScope scope("layers", block.layer);
      h = checkpoint(true, block, h);
    }
    return h;
  });
  ParameterGradients grads;
  EXPECT_FALSE(anomaly.first()) << "the first runs are finite";
  tape.backward({{loss, values<float>({1, 1})}}, grads);
  ASSERT_TRUE(anomaly.first());
  EXPECT_EQ(anomaly.first()->layer, "layers.7.mlp");
  EXPECT_EQ(anomaly.first()->phase, "replay");
  EXPECT_EQ(anomaly.first()->op, "factor");
  EXPECT_EQ(to_string(*anomaly.first()),
            "nan in replay of factor at layers.7.mlp, tensor 0, element 0");
}

}  // namespace
}  // namespace tapeline
