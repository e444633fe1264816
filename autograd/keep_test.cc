// Selective recompute: outputs of ops that a checkpoint keeps. Names are those
// of docs/checkpoint_and_offload.md.
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "autograd/checkpoint.h"
#include "autograd/offload_test_ops.h"
#include "autograd/ops.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

using test_ops::CopyDevice;
using test_ops::same_bits;
using test_ops::Stack;
using test_ops::TakesAway;
using test_ops::values;
using test_ops::Watch;

// y = x^2 by an op that can be kept and counts its kernels.
struct SquareNode : Node {
  SavedTensor x;
  void backward_inputs(Backward& b) override {
    b.add(0, scale(test_ops::product_of(b.grad(), x.unpack()), 2));
  }
};
struct Squares {
  const char* name = "square";
  int kernels = 0;
  std::vector<uint64_t> storages;  // of outputs, by run

  Tensor operator()(const Tensor& x) {
    Tensor y;
    internal::make_outputs(name, {&y}, [&] {
      ++kernels;
      y = test_ops::product_of(x, x);
    });
    storages.push_back(y.storage()->id());
    if (auto* n = push<SquareNode>(name, {&x}, {&y})) n->x.save(x);
    return y;
  }
};

int64_t kept_ops() { return checkpoint_counters().kept_ops; }
float value(const Tensor& x) { return x.to_vector<float>()[0]; }

// d of x^4 at 3, by two squares, under a policy.
float fourth_power(Squares& square, const RecomputePolicy& policy,
                   bool keep_region = false) {
  auto block = [&](const Tensor& x) {
    if (!keep_region) return square(square(x));
    return keep([&] { return square(square(x)); });
  };
  Tape tape;
  const Tensor x = tape.input(values<float>({3}));
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(policy, block, x)); });
  ParameterGradients grads;
  return value(tape.backward(loss, grads)[0]);
}

TEST(Keep, AReplayRunsNoKernelOfWhatIsKept) {
  struct Case {
    RecomputePolicy policy;
    bool region;
    int kernels, kept;
  };
  for (const Case& c : std::vector<Case>{{false, false, 2, 0},
                                         {true, false, 4, 0},
                                         {{true, {"square"}}, false, 2, 2},
                                         {true, true, 2, 2},
                                         {{true, {"square"}}, true, 2, 2},
                                         {{true, {"linear"}}, false, 4, 0},
                                         {{false, {"square"}}, true, 2, 0}}) {
    Squares square;
    const int64_t before = kept_ops();
    EXPECT_EQ(fourth_power(square, c.policy, c.region), 4 * 27);
    EXPECT_EQ(square.kernels, c.kernels);
    EXPECT_EQ(kept_ops() - before, c.kept);
  }
}

TEST(Keep, OutsideOfACheckpointItIsAPlainCall) {
  Squares square;
  Tape tape;
  const Tensor x = tape.input(values<float>({3}));
  const Tensor loss = record(
      tape, [&] { return sum(keep([&] { return square(square(x)); })); });
  ParameterGradients grads;
  EXPECT_EQ(value(tape.backward(loss, grads)[0]), 4 * 27);
  EXPECT_EQ(square.kernels, 2);
}

// B26: what is kept is what the first run used, the same storage.
TEST(Bug, B26_TheKeptValueIsTheOneThatWasUsed) {
  Squares square;
  fourth_power(square, {true, {"square"}});
  ASSERT_EQ(square.storages.size(), 4u);
  EXPECT_EQ(square.storages[2], square.storages[0]);
  EXPECT_EQ(square.storages[3], square.storages[1]);
}

TEST(Keep, ARetainedTapeReadsItAgain) {
  Squares square;
  auto block = [&](const Tensor& x) { return square(square(x)); };
  Tape tape;
  const Tensor x = tape.input(values<float>({3}));
  const Tensor loss = record(tape, [&] {
    return sum(checkpoint(RecomputePolicy(true, {"square"}), block, x));
  });
  ParameterGradients grads;
  for (const Retain retain : {Retain::kYes, Retain::kYes, Retain::kNo}) {
    EXPECT_EQ(value(tape.backward(loss, grads, retain)[0]), 4 * 27);
  }
  EXPECT_EQ(square.kernels, 2);
}

// Kept by the inner block, by the outer one, by a region around the inner one.
TEST(Keep, NestedCheckpointsKeepTheirOwn) {
  for (const bool inner_keeps : {false, true}) {
    for (const bool outer_keeps : {false, true}) {
      for (const bool region : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << inner_keeps << outer_keeps << region);
        Squares inside, outside;
        outside.name = "outer_square";
        const auto policy = [](bool keeps, const char* op) {
          return RecomputePolicy(true, keeps ? std::vector<std::string>{op}
                                             : std::vector<std::string>());
        };
        auto inner = [&](const Tensor& x) { return inside(x); };
        auto outer = [&](const Tensor& x) {
          const Tensor h = outside(x);
          const auto call = [&] {
            return checkpoint(policy(inner_keeps, "square"), inner, h);
          };
          return region ? keep(call) : call();
        };
        Tape tape;
        const Tensor x = tape.input(values<float>({3}));
        const Tensor loss = record(tape, [&] {
          return sum(checkpoint(policy(outer_keeps, "outer_square"), outer, x));
        });
        ParameterGradients grads;
        EXPECT_EQ(value(tape.backward(loss, grads, Retain::kYes)[0]), 4 * 27);
        EXPECT_EQ(value(tape.backward(loss, grads)[0]), 4 * 27);
        // First run; then per backward the outer replay and the inner one.
        EXPECT_EQ(inside.kernels, inner_keeps || region ? 1 : 1 + 2 * 2);
        EXPECT_EQ(outside.kernels, outer_keeps ? 1 : 1 + 2);
      }
    }
  }
}

TEST(Keep, WhatANestedCheckpointKeepsGoesThroughTheHooksToo) {
  Squares square;
  auto watch = std::make_shared<Watch>();
  auto inner = [&](const Tensor& x) { return square(x); };
  auto outer = [&](const Tensor& x) {
    return checkpoint(RecomputePolicy(true, {"square"}), inner, scale(x, 2));
  };
  Tape tape;
  const Tensor x = tape.input(values<float>({3}));
  const Tensor loss = record(tape, [&] {
    const HookScope hooks(watch);
    return sum(checkpoint(true, outer, x));
  });
  EXPECT_EQ(watch->storages,
            (std::vector<uint64_t>{x.storage()->id(), square.storages[0]}));
  ParameterGradients grads;
  EXPECT_EQ(value(tape.backward(loss, grads)[0]), 2 * 3 * 4);
  EXPECT_EQ(square.kernels, 1);
}

// What a stash holds is one value; its ops are kept by nobody.
TEST(Keep, OpsInsideAStashAreNotKept) {
  Squares square;
  auto block = [&](const Tensor& x) {
    return keep(
        [&] { return mul(x, stash([&] { return square(x.detach()); })); });
  };
  Tape tape;
  const Tensor x = tape.input(values<float>({3}));
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, block, x)); });
  const int64_t before = kept_ops();
  ParameterGradients grads;
  EXPECT_EQ(value(tape.backward(loss, grads)[0]), 9);
  EXPECT_EQ(square.kernels, 1);
  EXPECT_EQ(kept_ops(), before);
}

TEST(Keep, AFirstRunThatThrewKeepsNothing) {
  Squares square;
  bool fails = true;
  auto block = [&](const Tensor& x) {
    const Tensor y = keep([&] {
      const Tensor h = square(x);
      if (fails) throw std::runtime_error("first");
      return square(h);
    });
    return y;
  };
  Tape tape;
  const Tensor x = tape.input(values<float>({3}));
  const int64_t storages = Storage::live();
  EXPECT_THROW(record(tape, [&] { return checkpoint(true, block, x); }),
               std::runtime_error);
  EXPECT_EQ(Storage::live(), storages);
  fails = false;
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, block, x)); });
  ParameterGradients grads;
  EXPECT_EQ(value(tape.backward(loss, grads)[0]), 4 * 27);
  EXPECT_EQ(square.kernels, 3);
}

TEST(KeepDeathTest, AnotherKeptOpOnReplayIsNamed) {
  for (const bool more : {false, true}) {
    Squares one, two;
    two.name = "cube";  // a square by another name
    int run = 0;
    auto block = [&](const Tensor& x) {
      const LayerScope scope("layers", 7);
      return keep([&] {
        const Tensor y = one(x);
        if (run++ == 0) return more ? y : one(y);
        return two(y);
      });
    };
    Tape tape;
    const Tensor x = tape.input(values<float>({3}));
    const Tensor loss =
        record(tape, [&] { return sum(checkpoint(true, block, x)); });
    ParameterGradients grads;
    EXPECT_DEATH(tape.backward(loss, grads),
                 std::string("replay of layer 'layers.7' differs: step ") +
                     (more ? "2 of 2 is a kept op, it was the end"
                           : "3 of 4 is cube, it was square"));
  }
}

// Not all of it is read: the replay stopped short.
TEST(KeepDeathTest, KeptOpsThatAreLeftOverAreNamed) {
  Squares square;
  int run = 0;
  auto block = [&](const Tensor& x) {
    return keep([&] {
      const Tensor y = square(x);
      return run++ == 0 ? square(y) : y;
    });
  };
  Tape tape;
  const Tensor x = tape.input(values<float>({3}));
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, block, x)); });
  ParameterGradients grads;
  EXPECT_DEATH(tape.backward(loss, grads),
               "step 2 of 4 is the end, it was a kept op");
}

// B25: a kept value that was written since is an error, wherever it was.
TEST(BugDeathTest, B25_AKeptValueThatWasWrittenIsAnError) {
  Squares square;
  Tensor kept;
  bool inside = false;
  auto block = [&](const Tensor& x) {
    kept = square(x);
    const Tensor y = scale(kept, 2);
    if (inside) kept.set_zero();
    return y;
  };
  Tape tape;
  const Tensor x = tape.input(values<float>({3}));
  const RecomputePolicy policy(true, {"square"});
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(policy, block, x)); });
  ParameterGradients grads;
  EXPECT_DEATH(
      {
        kept.set_zero();
        tape.backward(loss, grads);
      },
      "a tensor saved for backward was written in place");
  inside = true;
  EXPECT_DEATH(record(tape, [&] { return checkpoint(policy, block, x); }),
               "a kept output was written in place");
  inside = false;
  EXPECT_EQ(value(tape.backward(loss, grads)[0]), 12);
}

// B27: kept tensors take the way of saved ones, through the hooks around the
// call; B28: hooks know that a replay runs.
TEST(Bug, B27_KeptTensorsGoThroughTheHooksAndB28_HooksSeeThePhase) {
  Squares square;
  auto watch = std::make_shared<Watch>(), backward = std::make_shared<Watch>();
  auto block = [&](const Tensor& x) { return square(square(x)); };
  Tape tape;
  const Tensor x = tape.input(values<float>({3}));
  const Tensor loss = record(tape, [&] {
    const HookScope hooks(watch);
    return sum(checkpoint(RecomputePolicy(true, {"square"}), block, x));
  });
  EXPECT_EQ(watch->storages,
            (std::vector<uint64_t>{x.storage()->id(), square.storages[0],
                                   square.storages[1]}));
  EXPECT_EQ(watch->packed, std::vector<Phase>(3, Phase::kOriginal));
  ParameterGradients grads;
  {
    const HookScope hooks(backward);
    tape.backward(loss, grads);
  }
  // The input before the replay begins, what is kept while it runs.
  EXPECT_EQ(
      watch->unpacked,
      (std::vector<Phase>{Phase::kOriginal, Phase::kReplay, Phase::kReplay}));
  EXPECT_EQ(backward->packed, std::vector<Phase>(2, Phase::kReplay));
  EXPECT_EQ(watch->dropped, 3);
  EXPECT_EQ(backward->dropped, 2);
}

// B27: in a window that lists their storages they are moved and counted.
TEST(Bug, B27_KeptTensorsAreOffloadedAndCounted) {
  CopyDevice device;
  OffloadGraph graph(test_ops::windows_of({2 * 400, 4}), /*strict=*/true);
  Squares square;
  std::vector<float> v(100);
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i);
  // The op's output is what the window lists: made before it opens.
  Tensor made;
  auto block = [&](const Tensor& x) {
    Tensor y;
    internal::make_outputs("square", {&y}, [&] {
      ++square.kernels;
      y = made;
    });
    if (auto* n = push<SquareNode>("square", {&x}, {&y})) n->x.save(x);
    return y;
  };
  Tape tape;
  const Tensor x = tape.input(values<float>(v));
  made = test_ops::product_of(x, x);
  const Tensor loss = record(tape, [&] {
    Tensor h;
    {
      const OffloadWindow window(&graph, 0, {x, made}, {});
      h = checkpoint(RecomputePolicy(true, {"square"}), block, x);
    }
    const OffloadWindow window(&graph, 1, {}, {});
    return sum(h);
  });
  EXPECT_EQ(made.storage()->residency(), Residency::kHost);
  EXPECT_EQ(graph.counters().copied_bytes, 800);
  ParameterGradients grads;
  const Tensor dx = tape.backward(loss, grads)[0];
  EXPECT_EQ(square.kernels, 1);
  for (size_t i = 0; i < v.size(); ++i) {
    EXPECT_EQ(dx.to_vector<float>()[i], 2 * v[i]);
  }
}

// A hook may take inputs, kept outputs and what nodes save away altogether.
TEST(Keep, HooksMayTakeTheTensorAway) {
  Stack stack(4);
  const Stack::Result want = stack.run({});
  for (const bool recompute : {false, true}) {
    auto hooks = std::make_shared<TakesAway>();
    const Stack::Options options = {.recompute = recompute,
                                    .keep = {"linear", "rms_norm"}};
    ParameterGradients grads;
    std::unique_ptr<Stack::Pass> pass;
    {
      const HookScope scope(hooks);
      pass = stack.forward(options);
    }
    Stack::Result got = stack.backward(*pass, grads, Retain::kYes);
    EXPECT_TRUE(same_bits(stack.backward(*pass, grads), got));
    EXPECT_TRUE(got[1] == want[1]);
    EXPECT_GT(hooks->unpacked, 4 * 4);
    EXPECT_EQ(hooks->dropped, static_cast<int>(hooks->away.size()));
  }
}

// Every op that says so can be kept: gradients keep their bits.
TEST(Keep, OpsNamedByAPolicyChangeNoBit) {
  Stack stack(4);
  const Stack::Result want = stack.run({.recompute = true});
  for (const std::vector<std::string>& keep :
       std::vector<std::vector<std::string>>{
           {"linear"}, {"rms_norm"}, {"rms_norm", "linear"}, {"attention"}}) {
    const int64_t before = kept_ops();
    EXPECT_TRUE(same_bits(stack.run({.recompute = true, .keep = keep}), want));
    const int64_t per_layer =
        keep[0] == "attention" ? 0 : static_cast<int64_t>(keep.size());
    EXPECT_EQ(kept_ops() - before, 4 * per_layer);
  }
}

}  // namespace
}  // namespace tapeline
