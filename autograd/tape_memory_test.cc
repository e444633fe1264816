// What tapes hold, and when they let go of it.
#include <memory>

#include "autograd/small_stack.h"
#include "autograd/tape.h"
#include "autograd/test_ops.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

using test_ops::factor;
using test_ops::on_small_stack;
using test_ops::parameter;
using test_ops::pass;
using test_ops::plus;
using test_ops::times;
using test_ops::values;
using test_ops::weigh;

TEST(TapeMemory, NothingIsLeftOfFiftySteps) {
  const Parameter w = parameter("w", values<float>({2}));
  ParameterGradients grads;
  grads.accumulator(w, 0);
  const int64_t nodes = live_nodes(), storages = Storage::live();
  for (int step = 0; step < 50; ++step) {
    Tape tape;
    const Tensor x = tape.input(values<float>({3}));
    const Tensor y = record(tape, [&] { return times(weigh(x, w), x); });
    EXPECT_EQ(live_nodes(), nodes + 2);
    switch (step % 4) {
      case 0:
        tape.backward(y, grads);
        EXPECT_EQ(live_nodes(), nodes);
        break;
      case 1:
        tape.backward(y, grads, Retain::kYes);
        EXPECT_EQ(live_nodes(), nodes + 2);
        break;
      case 2:
        tape.backward_inputs({{y, values<float>({1})}}, grads);
        EXPECT_EQ(live_nodes(), nodes + 1);
        if (step % 8 == 2) tape.backward_weights(grads);
        break;
      default:  // backward never runs
        break;
    }
  }
  EXPECT_EQ(live_nodes(), nodes);
  EXPECT_EQ(Storage::live(), storages);
}

TEST(TapeMemory, ATapeKeepsNeitherOutputsNorGradientsAlive) {
  Tape tape;
  Tensor x = tape.input(values<float>({3}));
  const int64_t storages = Storage::live();
  Tensor y = record(tape, [&] { return factor(pass(factor(x, 2)), 3); });
  EXPECT_EQ(Storage::live(), storages + 1);  // y
  ParameterGradients grads;
  const std::vector<Tensor> dx = tape.backward(y, grads, Retain::kYes);
  EXPECT_EQ(Storage::live(), storages + 2);  // y, dx
}

// 4 MiB activations; what a chain saves is freed node by node on the way back,
// and no more than two gradients live at a time.
TEST(TapeMemory, GradientsAndNodesAreReleasedOnTheWay) {
  constexpr int64_t kBytes = 4 << 20;
  constexpr int kLayers = 24;
  Device device(1);
  const DeviceScope scope(device);
  const auto live = [&] { return device.pool().stats().live; };
  const Tensor ones = Tensor::full({kBytes / 4}, DType::kF32, 1);
  Tape tape;
  std::vector<int64_t> live_at;
  const Tensor y = record(tape, [&] {
    Tensor x = tape.input(ones);
    for (int i = 0; i < kLayers; ++i) {
      x = pass(times(x, ones), "pass",
               [&](Backward&) { live_at.push_back(live()); });
    }
    return x;
  });
  const Seed seed{y, ones};
  const int64_t before = live();
  device.pool().reset_peak();
  ParameterGradients grads;
  tape.backward({seed}, grads);
  EXPECT_LE(device.pool().stats().peak - before, 2 * kBytes);
  ASSERT_EQ(live_at.size(), static_cast<size_t>(kLayers));
  for (int i = 2; i < kLayers; ++i) {
    EXPECT_EQ(live_at[i], live_at[i - 1] - kBytes) << i;
  }
}

TEST(TapeMemory, AChainThatSavesNothingStaysFlat) {
  constexpr int64_t kBytes = 4 << 20;
  Device device(1);
  const DeviceScope scope(device);
  const Tensor ones = Tensor::full({kBytes / 4}, DType::kF32, 1);
  const auto peak = [&](int layers) {
    Tape tape;
    const Tensor y = record(tape, [&] {
      Tensor x = tape.input(ones);
      for (int i = 0; i < layers; ++i) x = factor(x, 1);
      return x;
    });
    device.pool().reset_peak();
    const int64_t before = device.pool().stats().live;
    ParameterGradients grads;
    tape.backward({{y, ones}}, grads);
    return device.pool().stats().peak - before;
  };
  EXPECT_EQ(peak(5), peak(50));
  EXPECT_LE(peak(50), 2 * kBytes);
}

TEST(TapeMemory, IntegerOutputsGetNoGradient) {
  struct ChooseNode : Node {
    void backward_inputs(Backward& b) override { b.add(0, b.grad(0)); }
  };
  Device device(1);
  const DeviceScope scope(device);
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  Tensor ids;
  const Tensor y = record(tape, [&] {
    Tensor out = x.clone();
    ids = Tensor::zeros({1 << 20}, DType::kI32);
    push<ChooseNode>("choose", {&x}, {&out, &ids});
    return out;
  });
  device.pool().reset_peak();
  const int64_t before = device.pool().stats().live;
  ParameterGradients grads;
  tape.backward(y, grads);
  EXPECT_LT(device.pool().stats().peak - before, 1 << 20);
}

struct Chain {
  std::unique_ptr<Tape> tape = std::make_unique<Tape>();
  Tensor y;
  std::vector<Tensor> dx;

  explicit Chain(int nodes) {
    const Tensor x = tape->input(values<float>({1}));
    y = record(*tape, [&] {
      Tensor out = x;
      // Every node saves its input, which is the output of the one before.
      const Tensor one = values<float>({1});
      for (int i = 0; i < nodes; ++i) {
        out = i % 8 == 0 ? times(out, one) : pass(out);
      }
      return out;
    });
  }
};

TEST(TapeMemory, AMillionNodesAreFreedWithoutRecursion) {
  const int64_t nodes = live_nodes();
  Chain chain(1'000'000);
  EXPECT_EQ(live_nodes(), nodes + 1'000'000);
  on_small_stack([&] { chain.tape.reset(); });
  EXPECT_EQ(live_nodes(), nodes);
}

TEST(TapeMemory, GoingBackNeedsNoDeepStack) {
  Chain chain(100'000);
  on_small_stack([&] {
    ParameterGradients grads;
    chain.dx = chain.tape->backward(chain.y, grads);
  });
  EXPECT_EQ(chain.dx[0].to_vector<float>(), std::vector<float>{1});
}

TEST(TapeMemory, SlotsAndNodesOfATapeAreCountedAsItsOwn) {
  Tape a, b;
  const Tensor x = a.input(values<float>({1}));
  record(a, [&] { pass(pass(x)); });
  EXPECT_EQ(a.nodes(), 2);
  EXPECT_EQ(b.nodes(), 0);
  EXPECT_NE(a.id(), b.id());
}

TEST(TapeMemory, MovesWithItsNodes) {
  Tape a("first");
  const Tensor x = a.input(values<float>({2}));
  const Tensor y = record(a, [&] { return times(x, x); });
  Tape b = std::move(a);
  EXPECT_EQ(b.name(), "first");
  ParameterGradients grads;
  EXPECT_EQ(b.backward(y, grads)[0].to_vector<float>(), std::vector<float>{4});
}

}  // namespace
}  // namespace tapeline
