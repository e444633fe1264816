// Contracts of checkpoint by replay. Names are those of
// docs/checkpoint_and_offload.md.
#include "autograd/checkpoint.h"

#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "autograd/saved_tensor.h"
#include "autograd/tape.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

Tensor number(float x) { return Tensor::from<float>({x}, {1}); }
float value(const Tensor& x) { return x.to_vector<float>()[0]; }
Parameter weight(float x, bool trainable = true) {
  Parameter p(Shape{1, 1});
  p.set_value("w", Tensor::from<float>({x}, {1, 1}));
  p.set_trainable(trainable);
  return p;
}
Tensor times(const Tensor& x, const Parameter& w) {
  return reshape(linear(reshape(x, {1, 1}), w), {1});
}

struct Pair {
  Tensor direct;
  std::vector<Tensor> nested;
  FIELDS(direct, nested);
};
struct Wide {
  std::optional<Pair> pair;
  Tensor ids;
  FIELDS(pair, ids);
};

int64_t replays() { return checkpoint_counters().replays; }

TEST(Contract, C01_EveryTensorOfTheTreeIsAnInputThatGetsItsGradient) {
  Tape tape;
  const Tensor a = tape.input(number(2)), b = tape.input(number(5));
  auto block = [](const Pair& in) { return mul(in.direct, in.nested[0]); };
  const Tensor loss = record(tape, [&] {
    const Tensor direct = scale(a, 2), nested = scale(b, 3);
    const Tensor out = checkpoint(true, block, Pair{direct, {nested}});
    return sum(out) + sum(mul(nested, nested));
  });
  ParameterGradients grads;
  const int64_t before = replays();
  const std::vector<Tensor> d = tape.backward(loss, grads);
  EXPECT_EQ(value(d[0]), 30);
  EXPECT_EQ(value(d[1]), 102);
  EXPECT_EQ(replays(), before + 1);
}

TEST(Contract, C02_EveryDifferentiableOutputKeepsItsLink) {
  const Parameter w = weight(3), v = weight(7);
  auto block = [&](const Tensor& x) {
    return Wide{Pair{times(x, w), {times(x, v)}},
                Tensor::from<int32_t>({4}, {1})};
  };
  Tape tape;
  const Tensor x = tape.input(number(2));
  Wide out;
  const Tensor loss = record(tape, [&] {
    out = checkpoint(true, block, x);
    return sum(out.pair->direct) + sum(out.pair->nested[0]);
  });
  ParameterGradients grads;
  EXPECT_EQ(value(tape.backward(loss, grads)[0]), 10);
  EXPECT_EQ(value(grads.combined(w)), 2);
  EXPECT_EQ(value(grads.combined(v)), 2);
  EXPECT_FALSE(out.ids.requires_grad);  // C31
}

// However many checkpoints and ops use a parameter, it is ready once, when its
// gradient is complete, and before parameters whose first use is earlier.
TEST(Bug, B07_AParameterIsReadyOnceInEveryBackward) {
  const Parameter w = weight(3), early = weight(5), late = weight(7),
                  frozen = weight(11, /*trainable=*/false), idle = weight(13);
  auto inner = [&](const Tensor& x) { return times(x, w); };
  auto block = [&](const Tensor& x) { return checkpoint(true, inner, x); };
  for (const bool split : {false, true}) {
    Tape tape;
    const Tensor x = tape.input(number(2));
    const Tensor loss = record(tape, [&] {
      Tensor h = times(times(x, frozen), early);
      h = checkpoint(true, inner, h) + checkpoint(true, block, h);
      const Tensor unused = times(h, idle);
      return sum(times(times(h, w), late));
    });
    std::vector<std::pair<const Parameter::State*, float>> ready;
    ParameterGradients grads;
    grads.set_on_ready([&](const Parameter::State* key) {
      for (const Parameter& p : {w, early, late, idle}) {
        if (p.key() != key) continue;
        const Tensor sum = grads.combined(p);
        ready.emplace_back(key, sum ? value(sum) : 0);
      }
    });
    const int64_t before = replays();
    if (split) {
      const Tensor one = Tensor::full(loss.shape(), DType::kF32, 1);
      tape.backward_inputs({{loss, one}}, grads);
      EXPECT_TRUE(ready.empty());
      tape.backward_weights(grads);
    } else {
      tape.backward(loss, grads);
    }
    EXPECT_EQ(replays(), before + 3);
    // h = 2 * 11 * 5 = 110, and the loss is 2 * 110 w * w * 7.
    const std::vector<std::pair<const Parameter::State*, float>> expected = {
        {late.key(), 2 * 110 * 9.f},
        {idle.key(), 0},
        {w.key(), 2 * 110 * 2 * 3 * 7.f},
        {early.key(), 2 * 22 * 9 * 7.f}};
    EXPECT_EQ(ready, expected) << split;
  }
}

// An output that is an input keeps its link too, and so does one that is given
// twice.
TEST(Contract, C02_InputsPassedOnAreOutputs) {
  auto block = [](const Pair& in) {
    return Pair{in.direct, {scale(in.direct, 2), in.nested[0]}};
  };
  Tape tape;
  const Tensor a = tape.input(number(2)), b = tape.input(number(5));
  const Tensor loss = record(tape, [&] {
    const Pair out = checkpoint(true, block, Pair{a, {b}});
    const Pair twice = checkpoint(true, block, Pair{a, {a}});
    return sum(out.direct) + sum(out.nested[0]) +
           sum(mul(out.nested[1], out.nested[1])) + sum(twice.nested[1]);
  });
  ParameterGradients grads;
  const std::vector<Tensor> d = tape.backward(loss, grads);
  EXPECT_EQ(value(d[0]), 1 + 2 + 1);
  EXPECT_EQ(value(d[1]), 10);
}

// A number and nothing have the same shape and dtype.
TEST(ContractDeathTest, C03_AnOutputThatIsGoneOnReplayIsNamed) {
  int run = 0;
  auto block = [&](const Tensor& x) {
    const bool first = run++ == 0;
    return Pair{scale(x, 2),
                {first ? Tensor::full({}, DType::kF32, 1) : Tensor()}};
  };
  Tape tape;
  const Tensor x = tape.input(number(2));
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, block, x).direct); });
  ParameterGradients grads;
  EXPECT_DEATH(tape.backward(loss, grads), "output 1 is undefined, it was");
}

TEST(ContractDeathTest, C03_AnotherStructureOnReplayIsNamed) {
  int run = 0;
  auto block = [&](const Tensor& x) {
    Pair out{scale(x, 2), {}};
    if (run++ == 0) out.nested.push_back(x);
    return out;
  };
  Tape tape;
  const Tensor x = tape.input(number(2));
  const Tensor loss = record(tape, [&] {
    LayerScope scope("layers", 7);
    return sum(checkpoint(true, block, x).direct);
  });
  ParameterGradients grads;
  EXPECT_DEATH(tape.backward(loss, grads),
               "replay of layer 'layers.7' differs: another structure");
}

TEST(ContractDeathTest, B31_AnotherOpOnReplayIsNamed) {
  int run = 0;
  auto block = [&](const Tensor& x) {
    return run++ == 0 ? scale(x, 2) : mul(x, x);
  };
  Tape tape;
  const Tensor x = tape.input(number(2));
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, block, x)); });
  ParameterGradients grads;
  EXPECT_DEATH(tape.backward(loss, grads), "step 0 of 1 is mul, it was scale");
}

// Sees every tensor that is packed.
struct Watch : SavedTensorHooks {
  std::vector<uint64_t> storages;
  SavedHandle pack(Tensor& tensor) override {
    storages.push_back(tensor.storage()->id());
    return {};
  }
  Tensor unpack(SavedHandle, const Tensor& kept) override { return kept; }
};

TEST(Contract, C04_SavedInputsGoThroughTheHooksAroundTheCall) {
  auto watch = std::make_shared<Watch>();
  auto block = [](const Pair& in) { return mul(in.direct, in.nested[0]); };
  Tape tape;
  const Tensor a = tape.input(number(2)), b = tape.input(number(5));
  record(tape, [&] {
    const HookScope hooks(watch);
    return checkpoint(true, block, Pair{a, {b}});
  });
  EXPECT_EQ(watch->storages,
            (std::vector<uint64_t>{a.storage()->id(), b.storage()->id()}));
}

TEST(Contract, C06_TwoExecutionsOfWhichOneRecords) {
  std::vector<bool> recorded;
  std::vector<Phase> phases;
  auto block = [&](const Tensor& x) {
    recorded.push_back(grad_mode() == GradMode::kOn);
    phases.push_back(phase());
    return scale(x, 2);
  };
  Tape tape;
  const Tensor x = tape.input(number(2));
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, block, x)); });
  EXPECT_EQ(tape.nodes(), 2);  // the checkpoint and the sum
  ParameterGradients grads;
  tape.backward(loss, grads);
  EXPECT_EQ(recorded, (std::vector<bool>{false, true}));
  EXPECT_EQ(phases, (std::vector<Phase>{Phase::kOriginal, Phase::kReplay}));
  EXPECT_EQ(phase(), Phase::kOriginal);
}

TEST(Contract, C10_WithoutRecordingItJustRuns) {
  int run = 0;
  auto block = [&](const Tensor& x) {
    ++run;
    return scale(x, 2);
  };
  EXPECT_EQ(value(checkpoint(true, block, number(3))), 6);
  Tape tape;
  const Tensor x = tape.input(number(2));
  record(tape, [&] {
    const GradModeScope off(GradMode::kOff);
    return checkpoint(true, block, x);
  });
  EXPECT_EQ(tape.nodes(), 0);
  EXPECT_EQ(run, 2);
}

TEST(Contract, C11_ADetachedInputStillGivesParametersTheirGradients) {
  const Parameter w = weight(3);
  auto block = [&](const Tensor& x) { return times(x, w); };
  auto [loss, tape] =
      record([&] { return sum(checkpoint(true, block, number(2))); });
  EXPECT_TRUE(loss.requires_grad);
  ParameterGradients grads;
  tape.backward(loss, grads);
  EXPECT_EQ(value(grads.combined(w)), 2);
}

TEST(Contract, C12_AFrozenBlockOfDetachedInputsLeavesNoNode) {
  const Parameter w = weight(3, /*trainable=*/false);
  auto block = [&](const Tensor& x) { return times(x, w); };
  Tape tape;
  const Tensor y =
      record(tape, [&] { return checkpoint(true, block, number(2)); });
  EXPECT_FALSE(y.requires_grad);
  EXPECT_EQ(tape.nodes(), 0);
}

TEST(Contract, C14_WhatIsTouchedDecidesAndCapturesAreInputs) {
  const Parameter frozen = weight(3, false), unused = weight(5);
  struct Block {
    const Parameter& w;
    const Parameter& other;
    Tensor operator()(const Tensor& x) const { return times(x, w); }
  };
  Block block{frozen, unused};
  Tape tape;
  EXPECT_FALSE(record(tape, [&] {
                 return checkpoint(true, block, number(2));
               }).requires_grad);
  EXPECT_EQ(tape.nodes(), 0);
  // A tensor the function captured gets its gradient once.
  Tape second;
  const Tensor x = second.input(number(2));
  const Tensor h = record(second, [&] { return scale(x, 3); });
  auto captures = [&](const Tensor& y) { return mul(y, h); };
  const Tensor loss = record(
      second, [&] { return sum(checkpoint(true, captures, number(5))) + h; });
  ParameterGradients grads;
  EXPECT_EQ(value(second.backward(loss, grads)[0]), 3 * (5 + 1));
}

TEST(ContractDeathTest, B32_ACaptureThatWasWrittenSinceIsAnError) {
  Tape tape;
  const Tensor x = tape.input(number(2));
  const Tensor h = record(tape, [&] { return scale(x, 3); });
  auto block = [&](const Tensor& y) { return mul(y, h); };
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, block, number(5))); });
  h.set_zero();
  ParameterGradients grads;
  EXPECT_DEATH(tape.backward(loss, grads), "captured tensor was written");
}

TEST(ContractDeathTest, B32_ParametersConstantsAndStashesToo) {
  const Parameter w = weight(3);
  const Tensor constant = number(4);
  Tensor kept;
  auto block = [&](const Tensor& x) {
    kept = stash([] { return number(7); });
    return mul(mul(times(x, w), constant), kept);
  };
  Tape tape;
  const Tensor x = tape.input(number(5));
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, block, x)); });
  ParameterGradients grads;
  EXPECT_DEATH(
      {
        w.value().set_zero();
        tape.backward(loss, grads);
      },
      "parameter 'w'.*was written between forward and backward");
  EXPECT_DEATH(
      {
        constant.set_zero();
        tape.backward(loss, grads);
      },
      "a tensor it uses was written in place");
  EXPECT_DEATH(
      {
        kept.set_zero();
        tape.backward(loss, grads);
      },
      "a stashed tensor was written in place");
  EXPECT_EQ(value(tape.backward(loss, grads)[0]), 3 * 4 * 7);
}

TEST(ContractDeathTest, B32_AFunctionMayNotWriteItsInput) {
  auto block = [](const Tensor& x) {
    const Tensor y = mul(x, x);
    x.set_zero();
    return y;
  };
  Tape tape;
  const Tensor x = tape.input(number(5));
  EXPECT_DEATH(record(tape, [&] { return checkpoint(true, block, x); }),
               "writes its input");
}

TEST(ContractDeathTest, AnInputFromInsideAnotherRunIsRefused) {
  const Parameter w = weight(3);
  Tensor leak;
  auto one = [&](const Tensor& x) { return leak = scale(x, 2); };
  auto two = [&](const Tensor& x) { return times(x, w); };
  Tape tape;
  const Tensor x = tape.input(number(5));
  EXPECT_DEATH(record(tape,
                      [&] {
                        checkpoint(true, one, x);
                        return checkpoint(true, two, leak);
                      }),
               "made inside another checkpoint's run");
}

// A source that counts its calls: ids by call.
struct Source {
  std::vector<std::pair<int, int>> calls;
  int graph = 0, in_graph = 0;

  Tensor operator()() {
    calls.emplace_back(graph, ++in_graph);
    return number(static_cast<float>(10 * graph + in_graph));
  }
};

TEST(Contract, C15_OutsideOfACheckpointStashIsAPlainCall) {
  Source source;
  stash([&] { return source(); });
  stash([&] { return source(); });
  EXPECT_EQ(source.calls.size(), 2u);
}

TEST(Contract, C16_StashedValuesAreKeptAsTheSameStorage) {
  std::vector<uint64_t> seen;
  auto block = [&](const Tensor& x) {
    const Tensor ids = stash([&] {
      EXPECT_EQ(grad_mode(), GradMode::kOff);
      return scale(x, 2);
    });
    seen.push_back(ids.storage()->id());
    return mul(x, ids);
  };
  Tape tape;
  const Tensor x = tape.input(number(3));
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, block, x)); });
  ParameterGradients grads;
  EXPECT_EQ(value(tape.backward(loss, grads)[0]), 6);
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_EQ(seen[0], seen[1]);
}

TEST(ContractDeathTest, C17_AStashMoreOrLessOnReplayIsNamed) {
  for (const int more : {1, -1}) {
    int run = 0;
    auto block = [&](const Tensor& x) {
      const int count = 2 + more * run++;
      Tensor y = x;
      for (int i = 0; i < count; ++i) stash([] { return number(1); });
      return scale(y, 2);
    };
    Tape tape;
    const Tensor x = tape.input(number(3));
    const Tensor loss =
        record(tape, [&] { return sum(checkpoint(true, block, x)); });
    ParameterGradients grads;
    EXPECT_DEATH(tape.backward(loss, grads),
                 more > 0 ? "step 2 of 3 is a stash, it was scale"
                          : "step 1 of 3 is scale, it was a stash");
  }
}

// Two graphs of one block, each calling its source twice, replayed in reverse.
TEST(Contract, C18_FramesBelongToOneCall) {
  Source source;
  auto block = [&](const Tensor& x) {
    const Tensor first = stash([&] { return source(); });
    const Tensor second = stash([&] { return source(); });
    return mul(x, first) + mul(x, second);
  };
  Tape one, two;
  const Tensor x = one.input(number(1)), y = two.input(number(1));
  const auto run = [&](Tape& tape, const Tensor& in) {
    ++source.graph;
    source.in_graph = 0;
    return record(tape, [&] { return sum(checkpoint(true, block, in)); });
  };
  const Tensor first = run(one, x), second = run(two, y);
  ParameterGradients grads;
  EXPECT_EQ(value(two.backward(second, grads)[0]), 21 + 22);
  EXPECT_EQ(value(one.backward(first, grads)[0]), 11 + 12);
  EXPECT_EQ(source.calls,
            (std::vector<std::pair<int, int>>{{1, 1}, {1, 2}, {2, 1}, {2, 2}}));
}

TEST(Contract, C21_ARetainedTapeReplaysAgain) {
  Source source;
  const Parameter w = weight(3);
  auto block = [&](const Tensor& x) {
    return mul(times(x, w), stash([&] { return source(); }));
  };
  Tape tape;
  const Tensor x = tape.input(number(2));
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, block, x)); });
  ParameterGradients grads;
  const float once_ = value(tape.backward(loss, grads, Retain::kYes)[0]);
  EXPECT_EQ(value(tape.backward(loss, grads)[0]), once_);
  EXPECT_EQ(value(grads.combined(w)), 2 * 2 * 1);
  EXPECT_EQ(source.calls.size(), 1u);
  EXPECT_EQ(live_nodes(), 0);
}

TEST(Contract, C22_AnExceptionInAReplayLeavesTheFrameUsable) {
  bool fails = true;
  Source source;
  auto block = [&](const Tensor& x) {
    const Tensor ids = stash([&] { return source(); });
    if (phase() == Phase::kReplay && fails) throw std::runtime_error("once");
    return mul(x, ids);
  };
  Tape tape;
  const Tensor x = tape.input(number(2));
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, block, x)); });
  ParameterGradients grads;
  EXPECT_THROW(tape.backward(loss, grads, Retain::kYes), std::runtime_error);
  EXPECT_EQ(phase(), Phase::kOriginal);
  EXPECT_EQ(grad_mode(), GradMode::kOn);
  fails = false;
  EXPECT_EQ(value(tape.backward(loss, grads)[0]), 1);
  EXPECT_EQ(source.calls.size(), 1u);
}

TEST(Contract, B16_AnExceptionInTheFirstRunLeavesNothing) {
  bool fails = true;
  auto block = [&](const Tensor& x) {
    stash([] { return number(1); });
    if (fails) throw std::runtime_error("first");
    return scale(x, 2);
  };
  Tape tape;
  const Tensor x = tape.input(number(2));
  EXPECT_THROW(record(tape, [&] { return checkpoint(true, block, x); }),
               std::runtime_error);
  EXPECT_EQ(tape.nodes(), 0);
  fails = false;
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, block, x)); });
  ParameterGradients grads;
  EXPECT_EQ(value(tape.backward(loss, grads)[0]), 2);
}

TEST(Contract, C23_NestedCheckpointsCallTheirSourceOnce) {
  Source source;
  const Parameter w = weight(3);
  std::vector<Phase> phases;
  auto inner = [&](const Tensor& x) {
    phases.push_back(phase());
    return mul(times(x, w), stash([&] { return source(); }));
  };
  auto outer = [&](const Tensor& x) {
    return scale(checkpoint(true, inner, scale(x, 2)), 5);
  };
  Tape tape;
  const Tensor x = tape.input(number(2));
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, outer, x)); });
  ParameterGradients grads;
  EXPECT_EQ(value(tape.backward(loss, grads, Retain::kYes)[0]), 2 * 3 * 5);
  EXPECT_EQ(value(tape.backward(loss, grads)[0]), 2 * 3 * 5);
  EXPECT_EQ(value(grads.combined(w)), 2 * (4 * 5));
  EXPECT_EQ(source.calls.size(), 1u);
  // First run; then in each backward the outer's replay and its own.
  EXPECT_EQ(phases, (std::vector<Phase>{Phase::kOriginal, Phase::kReplay,
                                        Phase::kReplay, Phase::kReplay,
                                        Phase::kReplay}));
}

// An inner block that captures an intermediate of the outer one, and a tensor
// of the outermost tape.
TEST(Contract, C23_NestedCapturesReachTheirTape) {
  Tape tape;
  const Tensor x = tape.input(number(2)), z = tape.input(number(7));
  std::optional<Tensor> middle;
  auto inner = [&](const Tensor& y) { return mul(mul(y, *middle), z); };
  auto outer = [&](const Tensor& y) {
    middle = scale(y, 3);
    return checkpoint(true, inner, y);
  };
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, outer, x)); });
  ParameterGradients grads;
  for (const Retain retain : {Retain::kYes, Retain::kNo}) {
    const std::vector<Tensor> d = tape.backward(loss, grads, retain);
    EXPECT_EQ(value(d[0]), 2 * 3 * 2 * 7);  // d of 3 y^2 z
    EXPECT_EQ(value(d[1]), 3 * 2 * 2);
  }
}

// Also one that the outer function captured for an inner one that ignores it.
TEST(Contract, C23_CapturesMayBeInputsThatNestedCheckpointsIgnore) {
  Tape tape;
  const Tensor x = tape.input(number(3));
  Tensor captured;
  auto inner = [](const Pair& in) { return scale(in.direct, 2); };
  auto block = [&](const Tensor& in) {
    return checkpoint(true, inner, Pair{in, {captured}});
  };
  const Tensor loss = record(tape, [&] {
    captured = scale(x, 5);
    return sum(checkpoint(true, block, x) + captured);
  });
  ParameterGradients grads;
  EXPECT_EQ(value(tape.backward(loss, grads)[0]), 7);
}

TEST(Contract, C24_ThePhaseIsNotTheGradMode) {
  Source source;
  auto block = [&](const Tensor& x) {
    Tensor ids;
    {
      const GradModeScope mode(
          grad_mode() == GradMode::kOn ? GradMode::kOff : GradMode::kShadow);
      ids = stash([&] { return source(); });
    }
    once([&] { ++source.graph; });
    return mul(x, ids);
  };
  Tape tape;
  const Tensor x = tape.input(number(2));
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, block, x)); });
  ParameterGradients grads;
  tape.backward(loss, grads);
  EXPECT_EQ(source.calls.size(), 1u);
  EXPECT_EQ(source.graph, 1);  // B24: side effects once
}

TEST(Contract, C24_RecordingTurnedOnInTheFirstRunIsStillTheFirstRun) {
  const Parameter w = weight(3);
  auto block = [&](const Tensor& x) {
    Tensor y;
    {
      const GradModeScope on(GradMode::kOn);
      y = mul(x, x);
    }
    return times(y, w);
  };
  Tape tape;
  const Tensor x = tape.input(number(5));
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, block, x)); });
  EXPECT_EQ(tape.nodes(), 2);
  ParameterGradients grads;
  EXPECT_EQ(value(tape.backward(loss, grads)[0]), 2 * 5 * 3);
}

TEST(Contract, C17_AStashInsideAStashIsPartOfIt) {
  int calls = 0;
  auto block = [&](const Tensor& x) {
    const Tensor ids = stash([&] {
      return scale(stash([&] {
                     ++calls;
                     return number(3);
                   }),
                   2);
    });
    return mul(x, ids);
  };
  Tape tape;
  const Tensor x = tape.input(number(5));
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, block, x)); });
  ParameterGradients grads;
  EXPECT_EQ(value(tape.backward(loss, grads)[0]), 6);
  EXPECT_EQ(calls, 1);
}

// What is passed on is added to in the order of the plain program.
TEST(Equality, PassedOnInputsKeepTheOrderOfAdditions) {
  auto pass = [](const Tensor& x) { return x; };
  for (const bool recompute : {false, true}) {
    Tape tape;
    const Tensor x = tape.input(number(1));
    const Tensor loss = record(tape, [&] {
      const Tensor p = checkpoint(recompute, pass, x);
      const Tensor first = scale(x, 1), second = scale(p, 1e8);
      const Tensor third = scale(x, -1e8);  // backward: 1e8 meets it first
      return sum(first + second + third);
    });
    ParameterGradients grads;
    EXPECT_EQ(value(tape.backward(loss, grads)[0]), 1);
  }
}

TEST(Contract, C25_OpsInsideAStashAreNoPartOfTheReplay) {
  auto block = [](const Tensor& x) {
    const Tensor ids =
        stash([&] { return scale(mul(x.detach(), x.detach()), 3); });
    return mul(x, ids);
  };
  Tape tape;
  const Tensor x = tape.input(number(2));
  const Tensor loss =
      record(tape, [&] { return sum(checkpoint(true, block, x)); });
  ParameterGradients grads;
  EXPECT_EQ(value(tape.backward(loss, grads)[0]), 12);
}

TEST(ContractDeathTest, C16_AStashedGradientIsRefused) {
  const Parameter w = weight(2);
  auto block = [&](const Tensor& x) {
    return stash([&] {
      const GradModeScope on(GradMode::kShadow);
      return times(x, w);
    });
  };
  Tape tape;
  const Tensor x = tape.input(number(2));
  EXPECT_DEATH(record(tape, [&] { return checkpoint(true, block, x); }),
               "requires a gradient");
}

// --- Bits

// A block with several uses of its input, inside a model that uses it too.
struct Model {
  Parameter norm{Shape{8}}, w{Shape{8, 8}}, v{Shape{8, 8}};
  Tensor noise;

  explicit Model(DType dtype) {
    const auto values = [&](const Shape& shape, int seed) {
      std::vector<float> v_(static_cast<size_t>(shape.elements()));
      for (size_t i = 0; i < v_.size(); ++i) {
        v_[i] =
            std::sin(static_cast<float>(seed) + 1.7f * static_cast<float>(i));
      }
      return cast(Tensor::from(v_, shape), dtype);
    };
    norm.set_value("norm", values({8}, 1));
    w.set_value("w", values({8, 8}, 2));
    v.set_value("v", values({8, 8}, 3));
    noise = values({5, 8}, 4);
  }
  Tensor block(const Tensor& x) const {
    const Tensor h = rms_norm(x, norm, 1e-5);
    return x + mul(linear(h, w), linear(x, v)) + scale(x, 0.3);
  }
  struct Result {
    std::vector<float> loss, dx;
    std::vector<std::vector<float>> parameters;
    bool operator==(const Result&) const = default;
  };
  enum class Way { kPlain, kCheckpoint, kNested, kWhole };
  Result run(Way way, bool split) const {
    auto one = [&](const Tensor& x) { return block(x); };
    auto two = [&](const Tensor& x) {
      return checkpoint(way == Way::kNested, one,
                        checkpoint(way == Way::kNested, one, x));
    };
    Tape tape;
    const Tensor x = tape.input(noise);
    const Tensor loss = record(tape, [&] {
      Tensor h = scale(x, 1.1);
      const Tensor first = h;
      if (way == Way::kNested || way == Way::kWhole) {
        h = checkpoint(true, two, h);
      } else {
        h = checkpoint(way == Way::kCheckpoint, one, h);
        h = checkpoint(way == Way::kCheckpoint, one, h);
      }
      // Later uses of what the blocks saw; the weights once more.
      return sum(mul(h, first) + linear(first, w));
    });
    ParameterGradients grads;
    Result out;
    out.loss = cast(loss.detach(), DType::kF32).to_vector<float>();
    std::vector<Tensor> d;
    const Tensor one_ = Tensor::full(loss.shape(), loss.dtype(), 1.0);
    if (split) {
      d = tape.backward_inputs({{loss, one_}}, grads);
      tape.backward_weights(grads);
    } else {
      d = tape.backward(loss, grads);
    }
    out.dx = cast(d[0], DType::kF32).to_vector<float>();
    for (const Parameter& p : {norm, w, v}) {
      out.parameters.push_back(grads.combined(p).to_vector<float>());
    }
    return out;
  }
};

TEST(Equality, CheckpointsChangeNoBit) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const Model model(dtype);
    const Model::Result want = model.run(Model::Way::kPlain, false);
    int64_t before = replays();
    for (const bool split : {false, true}) {
      EXPECT_TRUE(model.run(Model::Way::kPlain, split) == want);
      EXPECT_EQ(replays(), before);
      EXPECT_TRUE(model.run(Model::Way::kCheckpoint, split) == want);
      EXPECT_EQ(replays(), before += 2);
      EXPECT_TRUE(model.run(Model::Way::kWhole, split) == want);
      EXPECT_EQ(replays(), before += 1);
      EXPECT_TRUE(model.run(Model::Way::kNested, split) == want);
      EXPECT_EQ(replays(), before += 3);
    }
  }
}

TEST(Bug, B19_NothingStaysAlive) {
  const int64_t storages = live_nodes();
  const Model model(DType::kF32);
  for (int i = 0; i < 20; ++i) {
    model.run(Model::Way::kNested, i % 2 == 0);
    // Also when backward never runs.
    auto one = [&](const Tensor& x) { return model.block(x); };
    Tape tape;
    record(tape,
           [&] { return checkpoint(true, one, tape.input(model.noise)); });
  }
  EXPECT_EQ(live_nodes(), storages);
}

TEST(Bug, B14_UseSitesAreThoseOfTheCall) {
  const Parameter w = weight(3);
  auto block = [&](const Tensor& x) { return times(x, w); };
  Tape tape;
  const Tensor x = tape.input(number(2));
  const Tensor loss = record(tape, [&] {
    const UseSite site(5);
    return sum(checkpoint(true, block, x));
  });
  ParameterGradients grads;
  tape.backward(loss, grads);
  EXPECT_EQ(value(grads.accumulator(w, 5)), 2);
}

}  // namespace
}  // namespace tapeline
