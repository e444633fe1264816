// Contracts of offload windows. Names are those of
// docs/checkpoint_and_offload.md; memory_plan_test.cc has those of the plan.
#include "autograd/offload.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "autograd/offload_test_ops.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

using test_ops::all_inputs;
using test_ops::CopyDevice;
using test_ops::hold;
using test_ops::parameter;
using test_ops::same_bits;
using test_ops::Stack;
using test_ops::values;
using test_ops::windows_of;

Tensor count_up(const Shape& shape, float from = 1) {
  std::vector<float> v(static_cast<size_t>(shape.elements()));
  for (float& x : v) x = from++;
  return Tensor::from(v, shape);
}

// A window for `lists` and one behind it, so that the first one's bytes leave.
Tensor two_windows(OffloadGraph& graph, const Tensor& x,
                   const std::vector<Tensor>& lists,
                   const std::vector<Tensor>& ids,
                   const std::vector<Tensor>& kept,
                   test_ops::See see = nullptr) {
  Tensor y;
  {
    const OffloadWindow window(&graph, 0, lists, ids);
    y = hold(x, kept, std::move(see));
  }
  const OffloadWindow behind(&graph, 1, {y}, {});
  return hold(y, {y});
}

// B41, B42, B44 and B68 are cases of it.
TEST(Contract, C38_AStorageIsCopiedOnceAndAllViewsComeBackExact) {
  CopyDevice device;
  const Tensor base = count_up({6, 4});
  const std::vector<Tensor> views = {base, base.slice(0, 1, 6),
                                     base.transpose(0, 1), base,
                                     base.slice(1, 2, 3)};
  std::vector<std::vector<float>> want, got;
  for (const Tensor& view : views) want.push_back(view.to_vector<float>());
  OffloadGraph graph(windows_of({base.bytes(), 4}), /*strict=*/true);
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const Tensor y = record(tape, [&] {
    return two_windows(graph, x, {base}, {}, views,
                       [&](const std::vector<Tensor>& kept) {
                         for (size_t i = 0; i < kept.size(); ++i) {
                           EXPECT_EQ(kept[i].storage(), base.storage());
                           EXPECT_EQ(kept[i].shape(), views[i].shape());
                           got.push_back(kept[i].to_vector<float>());
                         }
                       });
  });
  EXPECT_EQ(base.storage()->residency(), Residency::kHost);
  EXPECT_EQ(graph.counters().copies, 1);
  EXPECT_EQ(graph.counters().copied_bytes, base.bytes());
  EXPECT_EQ(graph.counters().repeated, 4);
  std::ostringstream printed;
  tape.print(printed);
  EXPECT_NE(printed.str().find("by offload window"), std::string::npos)
      << printed.str();
  const uint32_t version = base.storage()->version();
  ParameterGradients grads;
  tape.backward(y, grads);
  EXPECT_EQ(got, want);
  EXPECT_EQ(graph.counters().loaded_bytes, base.bytes());
  EXPECT_EQ(base.storage()->version(), version);
  EXPECT_EQ(device.log().size(), 2u) << "one copy out, one back";
  EXPECT_EQ(graph.status(), absl::OkStatus());
}

// The window lists a view: its storage moves, whatever of it is saved.
TEST(Bug, B42_AViewIsNotTakenForTheWhole) {
  CopyDevice device;
  const Tensor base = count_up({6, 4});
  const Tensor rest = base.slice(0, 1, 6);
  std::vector<float> got;
  OffloadGraph graph(windows_of({base.bytes(), 4}), /*strict=*/true);
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const Tensor y = record(tape, [&] {
    return two_windows(graph, x, {rest}, {}, {rest, base},
                       [&](const std::vector<Tensor>& kept) {
                         got = kept[1].to_vector<float>();
                         EXPECT_EQ(kept[0].offset(), 4);
                       });
  });
  ParameterGradients grads;
  tape.backward(y, grads);
  EXPECT_EQ(got, count_up({24}).to_vector<float>());
  EXPECT_EQ(graph.status(), absl::OkStatus());
}

// 20 steps: pinned memory is that of the longest, and the same buffers serve.
// B54: also where a step has one window.
TEST(Contract, C39_PinnedBuffersAreReusedAcrossSteps) {
  for (const int layers : {4, 2, 1}) {
    CopyDevice device;
    Stack stack(layers);
    std::mt19937 random(5);
    std::set<const std::byte*> first;
    int64_t bytes = 0, allocations = 0;
    for (int step = 0; step < 20; ++step) {
      const int rows = step == 0 ? 200 : 1 + static_cast<int>(random() % 200);
      const size_t logged = device.log().size();
      stack.run({.offload = all_inputs(), .recompute = step % 2 == 0}, rows);
      const PoolStats pinned = device->pinned().stats();
      EXPECT_EQ(pinned.live, 0);
      if (step == 0) {
        bytes = pinned.reserved;
        allocations = pinned.system_allocations;
        EXPECT_EQ(allocations, layers - 1);
      }
      EXPECT_EQ(pinned.reserved, bytes);
      EXPECT_EQ(pinned.system_allocations, allocations);
      for (size_t i = logged; i < device.log().size(); ++i) {
        const test_ops::IssuedCopy& copy = device.log()[i];
        if (copy.stream != "out") continue;
        if (step == 0) {
          first.insert(copy.to);
        } else {
          EXPECT_TRUE(first.contains(copy.to)) << "step " << step;
        }
      }
    }
    EXPECT_EQ(first.size(), static_cast<size_t>(layers - 1));
  }
}

TEST(Bug, B63_PinnedSlotsAreExact) {
  CopyDevice device;
  Stack stack(5);
  const auto pass = stack.forward({.offload = all_inputs()}, 333);
  const PoolStats pinned = device->pinned().stats();
  constexpr int64_t kAsked = 4 * 333 * Stack::kWidth * 4;
  EXPECT_EQ(pass->graph.counters().copied_bytes, kAsked);
  EXPECT_GE(static_cast<double>(kAsked),
            0.95 * static_cast<double>(pinned.reserved));
}

// While a window's layer is replayed, the window before it is on its way, and
// nobody has waited for that.
TEST(Contract, C40_TheWindowBeforeIsLoadedWhileOneIsUsed) {
  CopyDevice device;
  Stack stack(4);
  std::vector<std::string> order;
  std::vector<int64_t> arrived;
  const Stack::Options options = {
      .offload = all_inputs(), .recompute = true, .on_run = [&](int layer) {
        if (phase() == Phase::kOriginal) {
          EXPECT_EQ(device.in().bytes_copied(), 0);
          // The copy of the layer's input has its time.
          if (layer == 1) {
            EXPECT_EQ(device.out().bytes_copied(), 0);
          }
          return;
        }
        size_t loads = 0;
        for (const auto& copy : device.log()) loads += copy.stream == "in";
        order.push_back("replay " + std::to_string(layer) + " after " +
                        std::to_string(loads) + " loads");
        arrived.push_back(device.in().bytes_copied());
      }};
  const auto pass = stack.forward(options);
  ParameterGradients grads;
  stack.backward(*pass, grads);
  EXPECT_EQ(order, (std::vector<std::string>{
                       "replay 3 after 1 loads", "replay 2 after 2 loads",
                       "replay 1 after 3 loads", "replay 0 after 3 loads"}));
  const int64_t one = 16 * Stack::kWidth * 4;
  EXPECT_EQ(arrived.size(), 4u);
  for (size_t i = 0; i < arrived.size(); ++i) {
    // Compute has waited for what earlier replays used, no more.
    EXPECT_LE(arrived[i], static_cast<int64_t>(i) * one) << i;
  }
  EXPECT_EQ(pass->graph.counters().prefetched, 3);
  EXPECT_EQ(pass->graph.counters().late, 0);
}

TEST(Contract, C41_SelectionsLandInPinnedMemory) {
  CopyDevice device;
  std::vector<int32_t> ids(4096);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i) - 1;
  const Tensor ids_TK = Tensor::from(ids, {64, 64});
  OffloadGraph graph(
      plan_windows({{0, 0, ids_TK.bytes(), -1}, {1, 4, 0, 1}, {2, 4, 0, 2}},
                   {true, true, {}}),
      /*strict=*/false);
  std::vector<int32_t> got;
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const Tensor y = record(tape, [&] {
    return two_windows(graph, x, {}, {ids_TK}, {ids_TK},
                       [&](const std::vector<Tensor>& kept) {
                         EXPECT_EQ(kept[0].dtype(), DType::kI32);
                         EXPECT_EQ(kept[0].storage(), ids_TK.storage());
                         got = kept[0].to_vector<int32_t>();
                       });
  });
  EXPECT_EQ(ids_TK.storage()->residency(), Residency::kHost);
  // Whole pages, of the window behind it, too.
  EXPECT_EQ(device->pinned().stats().live, ids_TK.bytes() + 4096);
  device.finish_copies();
  ASSERT_EQ(device.log()[0].bytes, static_cast<size_t>(ids_TK.bytes()));
  EXPECT_EQ(std::memcmp(device.log()[0].to, ids.data(), ids.size() * 4), 0);
  ParameterGradients grads;
  tape.backward(y, grads);
  EXPECT_EQ(got, ids);
}

TEST(Contract, C42_ParametersAndEmptyTensorsStay) {
  CopyDevice device;
  const Tensor weight =
      Tensor::from(std::vector<float>(64, 1.5f), {8, 8}, Tag::kParameter);
  const Parameter w = parameter("w", weight);
  const Tensor none = Tensor::empty({0, 4}, DType::kF32);
  const Tensor h = count_up({8});
  const std::vector<Tensor> tensors = {w.value(), w.value().slice(0, 2, 4),
                                       none, Tensor(), h};
  OffloadGraph graph(windows_of({h.bytes(), 4}), /*strict=*/true);
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const Tensor y = record(tape, [&] {
    return two_windows(graph, x, tensors, {}, tensors,
                       [&](const std::vector<Tensor>& kept) {
                         EXPECT_EQ(kept[1].storage(), w.value().storage());
                         EXPECT_FALSE(kept[3]);
                         EXPECT_EQ(kept[4].to_vector<float>(),
                                   count_up({8}).to_vector<float>());
                       });
  });
  EXPECT_EQ(graph.counters().copies, 1);
  EXPECT_EQ(graph.counters().copied_bytes, h.bytes());
  EXPECT_EQ(w.value().storage()->residency(), Residency::kResident);
  ParameterGradients grads;
  tape.backward(y, grads);
  EXPECT_EQ(graph.status(), absl::OkStatus());
}

// Bits, and what moved, for every way through a stack.
TEST(Equality, WindowsChangeNoBit) {
  CopyDevice device;
  Stack stack(5);
  const Stack::Result want = stack.run({});
  EXPECT_TRUE(device.log().empty());
  for (const bool recompute : {false, true}) {
    for (const bool drop_norms : {false, true}) {
      for (const auto& keep : std::vector<std::vector<std::string>>{
               {}, {"linear"}, {"linear", "rms_norm"}}) {
        const size_t logged = device.log().size();
        EXPECT_TRUE(same_bits(stack.run({.offload = all_inputs(),
                                         .recompute = recompute,
                                         .drop_norms = drop_norms,
                                         .keep = keep}),
                              want));
        EXPECT_EQ(device.log().size() - logged, 8u) << "four out, four back";
      }
    }
  }
}

TEST(Equality, RetainedAndSplitBackwardsToo) {
  CopyDevice device;
  Stack stack(4);
  const Stack::Result want = stack.run({});
  for (const bool recompute : {false, true}) {
    const Stack::Options options = {.offload = all_inputs(),
                                    .recompute = recompute};
    {
      ParameterGradients first, second;
      const auto pass = stack.forward(options);
      stack.backward(*pass, first, Retain::kYes);
      Stack::Result got = stack.backward(*pass, second);
      stack.add_gradients(second, got);
      EXPECT_TRUE(same_bits(got, want));
      EXPECT_EQ(pass->graph.status(), absl::OkStatus()) << "they move once";
    }
    ParameterGradients grads;
    const auto pass = stack.forward(options);
    Stack::Result got = {pass->loss.to_vector<float>()};
    got.push_back(
        pass->tape
            .backward_inputs({{pass->loss, Tensor::full({1}, DType::kF32, 1)}},
                             grads)[0]
            .to_vector<float>());
    pass->tape.backward_weights(grads);
    stack.add_gradients(grads, got);
    EXPECT_TRUE(same_bits(got, want));
    EXPECT_EQ(pass->graph.status(), absl::OkStatus());
  }
}

// Gradients flow through the last window's neighbour alone where a pass ends
// early; windows in a replay, without a tape or without grad do nothing.
TEST(Offload, WindowsOpenWhereSomethingIsRecorded) {
  CopyDevice device;
  OffloadGraph graph(windows_of({4, 4, 4}), /*strict=*/false);
  const Tensor h = count_up({1});
  { const OffloadWindow window(&graph, 0, {h}, {}); }
  { const OffloadWindow window(nullptr, 0, {h}, {}); }
  Tape tape;
  const Tensor x = tape.input(count_up({1}));
  auto inner = [&](const Tensor& in) {
    const OffloadWindow window(&graph, 0, {in}, {});
    EXPECT_EQ(hook_depth(), 0);
    return hold(in, {in});
  };
  const Tensor y = record(tape, [&] {
    {
      const GradModeScope off(GradMode::kOff);
      const OffloadWindow window(&graph, 0, {h}, {});
    }
    { const OffloadWindow not_planned(&graph, 7, {h}, {}); }
    return checkpoint(true, inner, x);
  });
  ParameterGradients grads;
  tape.backward(y, grads);
  EXPECT_EQ(graph.counters().windows, 0);
  EXPECT_TRUE(device.log().empty());
}

TEST(OffloadDeathTest, StrictRefusesAUseThatWasNotPlanned) {
  CopyDevice device;
  Stack stack(3);
  const auto pass = stack.forward({.offload = all_inputs()});
  ASSERT_EQ(pass->inputs[0]->residency(), Residency::kHost);
  EXPECT_DEATH(pass->inputs[0]->acquire(device->compute()),
               "was evicted and is used outside its plan");
}

TEST(Offload, ElseItIsCounted) {
  CopyDevice device;
  Stack stack(3);
  const Stack::Result want = stack.run({});
  const auto pass = stack.forward({.offload = all_inputs(), .strict = false});
  const int64_t before = Storage::demand_reloads();
  pass->inputs[0]->acquire(device->compute());
  pass->inputs[0]->release(device->compute(), false);
  EXPECT_EQ(Storage::demand_reloads(), before + 1);
  ParameterGradients grads;
  Stack::Result got = stack.backward(*pass, grads);
  stack.add_gradients(grads, got);
  EXPECT_TRUE(same_bits(got, want));
  EXPECT_EQ(pass->graph.status(), absl::OkStatus()) << "not strict";
}

}  // namespace
}  // namespace tapeline
