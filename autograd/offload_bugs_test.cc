// Ways in which other systems' offload goes wrong, by the numbers of
// docs/checkpoint_and_offload.md.
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "autograd/offload.h"
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

constexpr int64_t kOne = 16 * Stack::kWidth * 4;  // bytes of a layer's input

// Saved tensors hold on to their hooks, whose scope may end at any time.
TEST(Bug, B17_AHookScopeMayEndInsideUnpack) {
  struct EndsScope : SavedTensorHooks {
    std::optional<HookScope>* scope = nullptr;
    SavedHandle pack(Tensor&) override { return {{7, 0}}; }
    Tensor unpack(SavedHandle handle, const Tensor& kept) override {
      EXPECT_EQ(handle.words[0], 7u);
      scope->reset();
      return kept;
    }
  };
  Tape tape;
  const Tensor x = tape.input(values<float>({3}));
  std::optional<HookScope> scope;
  const Tensor y = record(tape, [&] {
    auto hooks = std::make_shared<EndsScope>();
    hooks->scope = &scope;
    scope.emplace(std::move(hooks));
    return mul(x, x);
  });
  EXPECT_EQ(hook_depth(), 1);
  ParameterGradients grads;
  EXPECT_EQ(tape.backward(y, grads)[0].to_vector<float>(),
            std::vector<float>{6});
  EXPECT_EQ(hook_depth(), 0);
}

// A window that throws leaves no hooks.
TEST(Bug, B15_AnExceptionClosesTheWindow) {
  CopyDevice device;
  Stack stack(3);
  const Stack::Result want = stack.run({});
  EXPECT_THROW(stack.forward({.offload = all_inputs(),
                              .on_run =
                                  [](int layer) {
                                    if (layer == 1)
                                      throw std::runtime_error("layer 1");
                                  }}),
               std::runtime_error);
  EXPECT_EQ(hook_depth(), 0);
  EXPECT_EQ(device->pinned().stats().live, 0);
  EXPECT_TRUE(same_bits(stack.run({.offload = all_inputs()}), want));
}

TEST(Bug, B19_NothingStaysAliveAndB62_NorLeased) {
  CopyDevice device;
  Stack stack(4);
  const int64_t nodes = live_nodes(), storages = Storage::live();
  const int64_t live = device->pool().stats().live;
  for (int step = 0; step < 50; ++step) {
    const Stack::Options options = {.offload = all_inputs(),
                                    .recompute = step % 2 == 0,
                                    .drop_norms = step % 3 == 0,
                                    .keep = {"linear"}};
    {
      const auto pass = stack.forward(options);  // and never backward
      EXPECT_GT(device->pinned().stats().live, 0);
    }
    EXPECT_EQ(device->pinned().stats().live, 0);
    if (step % 10 == 0) stack.run(options);
    EXPECT_EQ(live_nodes(), nodes);
    EXPECT_EQ(Storage::live(), storages);
    EXPECT_EQ(device->pool().stats().live, live);
  }
}

// A graph that lives on for its counters holds nothing of a pass that is over.
TEST(Bug, B62_AGraphLetsGoWithTheTape) {
  CopyDevice device;
  Stack stack(4);
  const int64_t storages = Storage::live();
  for (const bool backward : {true, false}) {
    const auto pass = stack.forward({.offload = all_inputs()});
    if (backward) {
      ParameterGradients grads;
      stack.backward(*pass, grads);
    }
    pass->x = pass->loss = Tensor();
    pass->inputs.clear();
    pass->tape = Tape();
    EXPECT_EQ(Storage::live(), storages);
    EXPECT_EQ(device->pinned().stats().live, 0);
    EXPECT_EQ(pass->graph.counters().copies, 3);
  }
}

// Identity is the storage, not its address: another tensor in the same block
// is another one.
TEST(Bug, B43_AReusedAddressIsAnotherTensor) {
  CopyDevice device;
  OffloadGraph graph(windows_of({400, 400, 400}), /*strict=*/false);
  std::vector<float> got;
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const std::byte* address = nullptr;
  const auto address_of = [&](const Tensor& t) {
    const std::byte* at = t.storage()->acquire(device->compute());
    t.storage()->release(device->compute(), false);
    return at;
  };
  const Tensor y = record(tape, [&] {
    {
      const Tensor gone = Tensor::full({100}, DType::kF32, 1);
      address = address_of(gone);
      const OffloadWindow window(&graph, 0, {gone}, {});  // saves nothing of it
    }
    const Tensor next = Tensor::full({100}, DType::kF32, 2);
    EXPECT_EQ(address_of(next), address);
    Tensor h;
    {
      const OffloadWindow window(&graph, 1, {next}, {});
      h = hold(x, {next}, [&](const std::vector<Tensor>& kept) {
        got = kept[0].to_vector<float>();
      });
    }
    const OffloadWindow window(&graph, 2, {h}, {});
    return hold(h, {h});
  });
  EXPECT_EQ(graph.counters().copies, 1);
  ParameterGradients grads;
  tape.backward(y, grads);
  EXPECT_EQ(got, std::vector<float>(100, 2));
}

// Bytes that have not left when they are wanted stay: there is no load that
// could race the copy out.
TEST(Bug, B47_WhatIsStillThereIsNotLoaded) {
  CopyDevice device;
  OffloadGraph graph(windows_of({40, 40}), /*strict=*/true);
  const Tensor h = values<float>({1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  std::vector<float> got;
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const Tensor y = record(tape, [&] {
    const OffloadWindow window(&graph, 0, {h}, {});
    return hold(x, {h}, [&](const std::vector<Tensor>& kept) {
      EXPECT_EQ(device.out().bytes_copied(), 0) << "the copy is still queued";
      got = kept[0].to_vector<float>();
    });
  });
  EXPECT_EQ(h.storage()->residency(), Residency::kCopying);
  ParameterGradients grads;
  tape.backward(y, grads);
  device.finish_copies();
  EXPECT_EQ(got, (std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
  EXPECT_EQ(graph.counters().cancelled, 1);
  EXPECT_EQ(h.storage()->residency(), Residency::kResident);
  EXPECT_EQ(device->pinned().stats().live, 0);
  EXPECT_EQ(graph.counters().loaded_bytes, 0);
  EXPECT_EQ(device.in().bytes_copied(), 0);
  EXPECT_FALSE(graph.status().ok()) << "the plan had it moved";
}

// A storage that two windows list, whole and as a view: one copy, and it is
// there for both.
TEST(Bug, B49_ABaseAndItsViewInTwoWindows) {
  CopyDevice device;
  const Tensor base = values<float>({1, 2, 3, 4, 5, 6, 7, 8});
  const Tensor view = base.slice(0, 3, 8);
  OffloadGraph graph(windows_of({32, 32, 4}), /*strict=*/false);
  std::vector<float> got[2];
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const Tensor y = record(tape, [&] {
    Tensor h = x;
    for (const int layer : {0, 1}) {
      const Tensor& kept = layer == 0 ? base : view;
      const OffloadWindow window(&graph, layer, {kept}, {});
      h = hold(h, {kept}, [&got, layer](const std::vector<Tensor>& seen) {
        got[layer] = seen[0].to_vector<float>();
      });
    }
    const OffloadWindow window(&graph, 2, {h}, {});
    return hold(h, {h});
  });
  EXPECT_EQ(base.storage()->residency(), Residency::kHost);
  EXPECT_EQ(graph.counters().copies, 1);
  EXPECT_EQ(graph.counters().repeated, 1);
  ParameterGradients grads;
  tape.backward(y, grads);
  EXPECT_EQ(got[0], (std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(got[1], (std::vector<float>{4, 5, 6, 7, 8}));
  EXPECT_EQ(graph.counters().loaded_bytes, 32);
}

// A block that was evicted is reused while its copy out is still to run.
TEST(Bug, B50_AReusedBlockWaitsForTheCopyOut) {
  CopyDevice device;
  Stack stack(3);
  const Stack::Result want = stack.run({});
  const auto pass = stack.forward({.offload = all_inputs(), .recompute = true});
  EXPECT_EQ(pass->inputs[0]->residency(), Residency::kHost);
  // Others take the blocks and fill them.
  std::vector<Tensor> others;
  for (int i = 0; i < 8; ++i) {
    others.push_back(Tensor::full({kOne / 4}, DType::kF32, 77));
  }
  ParameterGradients grads;
  Stack::Result got = stack.backward(*pass, grads);
  stack.add_gradients(grads, got);
  EXPECT_TRUE(same_bits(got, want));
}

// A pinned slot is handed on while a load still reads it; B67: never while it
// is leased.
TEST(Bug, B52_APinnedSlotIsRewrittenAfterItsLoad) {
  CopyDevice device;
  const Tensor a = Tensor::full({1024}, DType::kF32, 3);
  const Tensor b = Tensor::full({1024}, DType::kF32, 5);
  // A pass over two stages, a tape each, and one that begins between their
  // backwards.
  OffloadGraph first(windows_of({a.bytes(), 4}), /*strict=*/true);
  OffloadGraph second(windows_of({b.bytes(), 4}), /*strict=*/true);
  Tape one, two, other;
  const Tensor x = one.input(values<float>({1}));
  const Tensor z = two.input(values<float>({1}));
  const Tensor u = other.input(values<float>({1}));
  std::vector<float> seen_a, seen_b;
  const Tensor y = record(one, [&] {
    const OffloadWindow window(&first, 0, {a}, {});
    return hold(x, {a}, [&](const std::vector<Tensor>& kept) {
      seen_a = kept[0].to_vector<float>();
    });
  });
  const Tensor end = record(two, [&] {
    const OffloadWindow window(&first, 1, {z}, {});
    return hold(z, {z});
  });
  ParameterGradients grads;
  two.backward(end, grads);
  EXPECT_EQ(a.storage()->residency(), Residency::kLoading);
  EXPECT_EQ(device.in().bytes_copied(), 0);
  const Tensor v = record(other, [&] {
    Tensor h;
    {
      const OffloadWindow window(&second, 0, {b}, {});
      h = hold(u, {b}, [&](const std::vector<Tensor>& kept) {
        seen_b = kept[0].to_vector<float>();
      });
    }
    const OffloadWindow window(&second, 1, {h}, {});
    return hold(h, {h});
  });
  EXPECT_EQ(device->pinned().stats().system_allocations, 1) << "one slot";
  device.out().advance(10);
  EXPECT_EQ(device.out().bytes_copied(), a.bytes()) << "b waits for a's load";
  one.backward(y, grads);
  other.backward(v, grads);
  EXPECT_EQ(seen_a, std::vector<float>(1024, 3));
  EXPECT_EQ(seen_b, std::vector<float>(1024, 5));
}

TEST(Bug, B67_SlotsOfPassesInFlightAreDistinct) {
  CopyDevice device;
  Stack stack(4);
  std::vector<std::unique_ptr<Stack::Pass>> passes;
  for (int i = 0; i < 3; ++i)
    passes.push_back(stack.forward({.offload = all_inputs()}));
  std::set<const std::byte*> slots;
  for (const auto& copy : device.log()) slots.insert(copy.to);
  EXPECT_EQ(slots.size(), 9u);
  EXPECT_EQ(device.log().size(), 9u);
}

// Two passes in flight, backward in both orders: as without offload.
TEST(Bug, B55_TwoPassesInFlight) {
  CopyDevice device;
  Stack stack(4);
  for (const bool reversed : {false, true}) {
    std::vector<Stack::Result> results;
    for (const OffloadChoice& choice : {OffloadChoice{}, all_inputs()}) {
      ParameterGradients grads;
      const Stack::Options options = {.offload = choice, .recompute = true};
      const auto f0 = stack.forward(options, 16, 100);
      const auto f1 = stack.forward(options, 16, 200);
      Stack::Result& out = results.emplace_back();
      for (Stack::Pass* pass :
           {reversed ? f1.get() : f0.get(), reversed ? f0.get() : f1.get()}) {
        const Stack::Result part = stack.backward(*pass, grads);
        out.insert(out.end(), part.begin(), part.end());
        EXPECT_EQ(pass->graph.status(), absl::OkStatus());
        EXPECT_EQ(pass->graph.counters().copied_bytes,
                  choice.activations ? 3 * kOne : 0);
        EXPECT_EQ(pass->graph.counters().late, 0);
      }
      stack.add_gradients(grads, out);
    }
    EXPECT_TRUE(same_bits(results[1], results[0]));
  }
}

// B57: one numbering; whatever windows there are, each is loaded by the next.
TEST(Bug, B56_AnySubsetOfWindowsIsPrefetched) {
  CopyDevice device;
  constexpr int kLayers = 9;
  Stack stack(kLayers);
  const Stack::Result want = stack.run({});
  std::mt19937 random(1);
  int64_t prefetched = 0;
  for (int run = 0; run < 25; ++run) {
    OffloadChoice choice = all_inputs();
    for (int i = 0; i < kLayers; ++i)
      choice.layers.push_back(random() % 2 == 0);
    if (run == 0) choice.layers = {0, 0, 0, 1, 0, 1, 0, 0, 0, 1};  // 3, 5, 9
    ParameterGradients grads;
    const auto pass =
        stack.forward({.offload = choice, .recompute = run % 2 == 0});
    Stack::Result got = stack.backward(*pass, grads);
    stack.add_gradients(grads, got);
    EXPECT_TRUE(same_bits(got, want));
    const OffloadCounters& counters = pass->graph.counters();
    const auto windows = static_cast<int64_t>(pass->graph.plan().size());
    EXPECT_EQ(counters.windows, windows);
    EXPECT_EQ(counters.prefetched, std::max<int64_t>(windows - 1, 0));
    EXPECT_EQ(counters.late, 0);
    EXPECT_EQ(pass->graph.status(), absl::OkStatus());
    prefetched += counters.prefetched;
  }
  EXPECT_GT(prefetched, 50);
}

// Without pinned memory the bytes stay; strict says so.
TEST(Bug, B64_WithoutPinnedMemoryTheBytesStay) {
  CopyDevice device;
  Stack stack(4);
  const Stack::Result want = stack.run({});
  // None at all; room for one of three windows.
  for (const int64_t cap : {int64_t{1}, kOne}) {
    device->pinned().set_cap(cap);
    for (const bool strict : {false, true}) {
      ParameterGradients grads;
      const auto pass = stack.forward(
          {.offload = all_inputs(), .recompute = true, .strict = strict});
      Stack::Result got = stack.backward(*pass, grads);
      stack.add_gradients(grads, got);
      EXPECT_TRUE(same_bits(got, want));
      const int64_t moved = cap == kOne ? kOne : 0;
      EXPECT_EQ(pass->graph.counters().copied_bytes, moved);
      EXPECT_EQ(pass->graph.counters().refused_bytes, 3 * kOne - moved);
      EXPECT_LE(device->pinned().stats().reserved, cap);
      const absl::Status status = pass->graph.status();
      if (!strict) {
        EXPECT_EQ(status, absl::OkStatus());
        continue;
      }
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
      EXPECT_NE(status.message().find(std::to_string(3 * kOne - moved) +
                                      " of " + std::to_string(3 * kOne) +
                                      " bytes could not be offloaded"),
                std::string::npos)
          << status.message();
    }
  }
}

// The host sees bytes once they are there.
TEST(Bug, B65_TheHostWaitsForTheBytes) {
  CopyDevice device;
  OffloadGraph graph(windows_of({40, 4}), /*strict=*/false);
  const std::vector<float> want = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  const Tensor h = values<float>(want);
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const Tensor y = record(tape, [&] {
    Tensor out;
    {
      const OffloadWindow window(&graph, 0, {h}, {});
      out = hold(x, {h});
      EXPECT_EQ(h.storage()->residency(), Residency::kCopying);
      EXPECT_EQ(h.to_vector<float>(), want);
    }
    const OffloadWindow window(&graph, 1, {out}, {});
    return hold(out, {out});
  });
  EXPECT_EQ(h.storage()->residency(), Residency::kHost);
  EXPECT_EQ(device.out().bytes_copied(), 0);
  h.storage()->load();
  EXPECT_EQ(h.storage()->residency(), Residency::kLoading);
  EXPECT_EQ(h.to_vector<float>(), want);
}

// A write takes a copy out of play, also one that no kernel makes.
TEST(Bug, B65_AWriteWhileCopiedOutIsNotLost) {
  CopyDevice device;
  const Tensor h = values<float>({1, 2, 3});
  ASSERT_TRUE(h.storage()->copy_out());
  h.set_zero();
  EXPECT_FALSE(h.storage()->evict()) << "the host has the old bytes";
  device.finish_copies();
  EXPECT_EQ(h.to_vector<float>(), (std::vector<float>{0, 0, 0}));
}

// Offload that offloads nothing is an error, whatever the reason.
TEST(Bug, B70_AnOffloadThatDoesNothingIsAnError) {
  CopyDevice device;
  const auto message = [](const OffloadGraph& graph) {
    EXPECT_EQ(graph.status().code(), absl::StatusCode::kInternal);
    return std::string(graph.status().message());
  };
  // No window was opened.
  OffloadGraph never(windows_of({40, 40}), /*strict=*/true);
  EXPECT_EQ(message(never),
            "offload moved 0 bytes out and 0 back in 0 windows, the plan has "
            "40 in 2");
  // Windows list what nobody saves, or something else is saved.
  OffloadGraph other(windows_of({40, 4}), /*strict=*/true);
  const Tensor listed = Tensor::zeros({10}, DType::kF32),
               saved = values<float>({1});
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const Tensor y = record(tape, [&] {
    Tensor h;
    {
      const OffloadWindow window(&other, 0, {listed}, {});
      h = hold(x, {saved});
    }
    const OffloadWindow window(&other, 1, {h}, {});
    return hold(h, {h});
  });
  ParameterGradients grads;
  tape.backward(y, grads);
  EXPECT_EQ(message(other),
            "offload moved 0 bytes out and 0 back in 2 windows, the plan has "
            "40 in 2");
  // It went out and backward never came for it.
  Stack stack(3);
  const auto pass = stack.forward({.offload = all_inputs()});
  EXPECT_EQ(message(pass->graph),
            "offload moved " + std::to_string(2 * kOne) +
                " bytes out and 0 back in 3 windows, the plan has " +
                std::to_string(2 * kOne) + " in 3");
}

}  // namespace
}  // namespace tapeline
