#include "autograd/dropped_outputs.h"

#include <memory>
#include <optional>
#include <vector>

#include "autograd/checkpoint.h"
#include "autograd/offload_test_ops.h"
#include "autograd/ops.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

using test_ops::CopyDevice;
using test_ops::hold;
using test_ops::same_bits;
using test_ops::Stack;
using test_ops::values;
using test_ops::Watch;

// y = 2 x, and how often it ran.
struct Doubles {
  mutable int runs = 0;
  Tensor operator()(const Tensor& x) const {
    ++runs;
    return scale(x, 2);
  }
};

TEST(DroppedOutputs, BytesReturnToThePoolAndAreMadeAgain) {
  CopyDevice device;
  const Doubles doubles;
  constexpr int64_t kBytes = 1 << 20;
  const Tensor ones = Tensor::full({kBytes / 4}, DType::kF32, 1);
  Tape tape;
  const Tensor x = tape.input(ones);
  std::vector<float> seen;
  int64_t live[2];
  const int64_t before = refills();
  const Tensor y = record(tape, [&] {
    live[0] = device->pool().stats().live;
    Tensor h;
    {
      DroppedOutputs dropped(true);
      h = hold(x, {dropped(doubles, x)}, [&](const std::vector<Tensor>& kept) {
        EXPECT_EQ(kept[0].storage()->residency(), Residency::kDropped);
        seen = kept[0].to_vector<float>();
        EXPECT_EQ(kept[0].storage()->residency(), Residency::kResident);
      });
      live[1] = device->pool().stats().live;
    }
    EXPECT_EQ(device->pool().stats().live, live[1] - kBytes);
    return h;
  });
  EXPECT_EQ(live[1], live[0] + 2 * kBytes);  // h and what was dropped
  EXPECT_EQ(doubles.runs, 1);
  EXPECT_EQ(refills(), before);
  ParameterGradients grads;
  tape.backward({{y, ones}}, grads, Retain::kYes);
  EXPECT_EQ(seen, std::vector<float>(kBytes / 4, 2));
  EXPECT_EQ(doubles.runs, 2);
  EXPECT_EQ(refills(), before + 1);
}

TEST(DroppedOutputs, SideEffectsHappenOnce) {
  CopyDevice device;
  std::vector<Phase> phases;
  int counted = 0;
  const auto counts = [&](const Tensor& x) {
    phases.push_back(phase());
    once([&] { ++counted; });
    return scale(x, 2);
  };
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const Tensor y = record(tape, [&] {
    DroppedOutputs dropped(true);
    return hold(x, {dropped(counts, x)}, [](const std::vector<Tensor>& kept) {
      EXPECT_EQ(kept[0].to_vector<float>(), std::vector<float>{2});
    });
  });
  ParameterGradients grads;
  tape.backward(y, grads);
  EXPECT_EQ(phases, (std::vector<Phase>{Phase::kOriginal, Phase::kReplay}));
  EXPECT_EQ(counted, 1);
  EXPECT_EQ(phase(), Phase::kOriginal);
}

// Also through views that were made before, which share the storage.
TEST(DroppedOutputs, ViewsSeeTheBytesAgainAndNothingCountsAsWritten) {
  CopyDevice device;
  const Doubles doubles;
  Tape tape;
  const Tensor x = tape.input(values<float>({1, 2, 3, 4, 5, 6}));
  Tensor base;
  const Tensor y = record(tape, [&] {
    DroppedOutputs dropped(true);
    base = dropped(doubles, x);
    const Tensor table = base.view_as({2, 3});
    return hold(
        x, {table.transpose(0, 1), base.slice(0, 4, 6), base},
        [](const std::vector<Tensor>& kept) {
          EXPECT_EQ(kept[0].to_vector<float>(),
                    (std::vector<float>{2, 8, 4, 10, 6, 12}));
          EXPECT_EQ(kept[1].to_vector<float>(), (std::vector<float>{10, 12}));
          EXPECT_EQ(kept[2].storage(), kept[0].storage());
        });
  });
  const uint32_t version = base.storage()->version();
  const uint64_t id = base.storage()->id();
  ParameterGradients grads;
  const Seed seed{y, Tensor::full({6}, DType::kF32, 1)};
  tape.backward({seed}, grads, Retain::kYes);
  tape.backward({seed}, grads);  // the bytes are there
  EXPECT_EQ(doubles.runs, 2);
  EXPECT_EQ(base.storage()->version(), version);
  EXPECT_EQ(base.storage()->id(), id);
}

TEST(DroppedOutputs, WhatNobodySavedIsGoneAnyway) {
  CopyDevice device;
  const Doubles doubles;
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const int64_t storages = Storage::live();
  record(tape, [&] {
    DroppedOutputs dropped(true);
    hold(x, {});
    dropped(doubles, x);
    return 0;
  });
  EXPECT_EQ(Storage::live(), storages);
}

// Off, without a tape, without grad, in a checkpoint's runs: a plain call.
TEST(DroppedOutputs, WhereNothingIsRecordedNothingIsDropped) {
  CopyDevice device;
  const Doubles doubles;
  std::vector<Residency> states;
  const auto run = [&](const Tensor& x, bool on) {
    Tensor y;
    {
      DroppedOutputs dropped(on);
      y = dropped(doubles, x);
    }
    states.push_back(y.storage()->residency());
    return y;
  };
  run(values<float>({1}), true);  // no tape
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  auto block = [&](const Tensor& in) { return run(in, true); };
  const Tensor loss = record(tape, [&] {
    {
      const GradModeScope off(GradMode::kOff);
      run(x, true);
    }
    run(x, false);
    return sum(checkpoint(true, block, x));
  });
  ParameterGradients grads;
  tape.backward(loss, grads);
  EXPECT_EQ(states, std::vector<Residency>(5, Residency::kResident));
  record(tape = Tape(),
         [&] { return run(tape.input(values<float>({1})), true); });
  EXPECT_EQ(states.back(), Residency::kDropped) << "and here it is";
}

TEST(DroppedOutputs, ChangeNoBit) {
  CopyDevice device;
  Stack stack(5);
  const Stack::Result want = stack.run({});
  const int64_t before = refills();
  EXPECT_TRUE(same_bits(stack.run({.drop_norms = true}), want));
  EXPECT_EQ(refills(), before + 5);
  // Layers that are recomputed drop nothing.
  EXPECT_TRUE(
      same_bits(stack.run({.recompute = true, .drop_norms = true}), want));
  EXPECT_EQ(refills(), before + 5);
  // I and W apart: W reads what I made again.
  ParameterGradients grads;
  const auto pass = stack.forward({.drop_norms = true});
  Stack::Result got = {pass->loss.to_vector<float>()};
  got.push_back(
      pass->tape
          .backward_inputs({{pass->loss, Tensor::full({1}, DType::kF32, 1)}},
                           grads)[0]
          .to_vector<float>());
  pass->tape.backward_weights(grads);
  stack.add_gradients(grads, got);
  EXPECT_TRUE(same_bits(got, want));
}

// The input is saved like any other: through hooks, which outlive the output.
TEST(DroppedOutputs, TheInputGoesThroughTheHooks) {
  CopyDevice device;
  const Doubles doubles;
  auto watch = std::make_shared<Watch>();
  auto tape = std::make_unique<Tape>();
  const Tensor x = tape->input(values<float>({1}));
  Tensor kept;
  record(*tape, [&] {
    {
      const HookScope hooks(watch);
      DroppedOutputs dropped(true);
      kept = dropped(doubles, x);
      hold(x, {kept});
    }
    // Made again while something is recorded, which it is no part of.
    EXPECT_EQ(kept.to_vector<float>(), std::vector<float>{2});
    return 0;
  });
  EXPECT_EQ(tape->nodes(), 2);
  EXPECT_EQ(watch->storages,
            (std::vector<uint64_t>{x.storage()->id(), kept.storage()->id()}));
  EXPECT_EQ(watch->unpacked.size(), 1u);
  tape.reset();
  EXPECT_EQ(watch->dropped, 2);
}

// An output that outlives its tape holds nothing of it.
TEST(DroppedOutputs, EndWithTheirTape) {
  CopyDevice device;
  const Doubles doubles;
  auto watch = std::make_shared<Watch>();
  Tensor kept;
  {
    Tape tape;
    const Tensor x = tape.input(values<float>({1}));
    record(tape, [&] {
      const HookScope hooks(watch);
      DroppedOutputs dropped(true);
      kept = dropped(doubles, x);
      return 0;
    });
    EXPECT_EQ(watch->dropped, 0);
  }
  EXPECT_EQ(watch->dropped, 1);
  watch.reset();
  kept = Tensor();
}

TEST(DroppedOutputsDeathTest, ReadAfterTheTapeIsGone) {
  CopyDevice device;
  const Doubles doubles;
  Tensor kept;
  {
    Tape tape;
    record(tape, [&] {
      DroppedOutputs dropped(true);
      return kept = dropped(doubles, tape.input(values<float>({1})));
    });
  }
  EXPECT_DEATH(kept.to_vector<float>(), "read after its tape is gone");
}

TEST(DroppedOutputsDeathTest, AnInputThatWasWrittenSinceIsAnError) {
  CopyDevice device;
  const Doubles doubles;
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const Tensor y = record(tape, [&] {
    DroppedOutputs dropped(true);
    return hold(x, {dropped(doubles, x)}, [](const std::vector<Tensor>& kept) {
      kept[0].to_vector<float>();
    });
  });
  x.set_zero();
  ParameterGradients grads;
  EXPECT_DEATH(tape.backward(y, grads),
               "a tensor saved for backward was written in place");
}

TEST(DroppedOutputsDeathTest, OnlyAnOutputOfItsOwnIsDropped) {
  CopyDevice device;
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const auto same = [](const Tensor& in) { return reshape(in, {1, 1}); };
  EXPECT_DEATH(record(tape,
                      [&] {
                        DroppedOutputs dropped(true);
                        return dropped(same, x);
                      }),
               "only an output of its own is dropped");
}

}  // namespace
}  // namespace tapeline
