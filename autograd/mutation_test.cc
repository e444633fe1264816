// Passes with windows, under a checker of orders and at any time of completion:
// nothing is read before it is there or overwritten while it is read. Each of
// the orderings that make it so (runtime/edge.h) is dropped once, and missed.
#include <memory>
#include <string>
#include <vector>

#include "autograd/offload_test_ops.h"
#include "gtest/gtest.h"
#include "runtime/edge.h"
#include "runtime/fake_device.h"

namespace tapeline {
namespace {

using test_ops::all_inputs;
using test_ops::hold;
using test_ops::same_bits;
using test_ops::Stack;
using test_ops::values;
using test_ops::windows_of;

constexpr int64_t kBytes = 40'000;  // more than a pass's slots have

// Passes 0 and 1: F forward, B backward, D neither finished nor wanted.
constexpr const char* kSchedules[] = {"F0 B0 F1 B1", "F0 F1 B0 B1",
                                      "F0 F1 B1 B0", "F0 D0 F1 B1"};

struct Seen {
  int64_t races = 0, wrong_passes = 0;
  std::string report;
};

// A pass that ends before its second window: bytes are wanted back before they
// have left.
bool cut_short_is_right() {
  OffloadGraph graph(windows_of({kBytes, 4}), /*strict=*/false);
  const Tensor h = Tensor::full({kBytes / 4}, DType::kF32, 3);
  std::vector<float> got;
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const Tensor y = record(tape, [&] {
    const OffloadWindow window(&graph, 0, {h}, {});
    return hold(x, {h}, [&](const std::vector<Tensor>& kept) {
      got = kept[0].to_vector<float>();
    });
  });
  ParameterGradients grads;
  tape.backward(y, grads);
  return got == std::vector<float>(kBytes / 4, 3);
}

// A pass over two stages, a tape each. Between their backwards, while the first
// one's bytes are on their way, another pass copies to the same pinned slot.
bool two_stages_are_right() {
  OffloadGraph first(windows_of({kBytes, 4}), /*strict=*/false);
  OffloadGraph second(windows_of({kBytes, 4}), /*strict=*/false);
  const Tensor a = Tensor::full({kBytes / 4}, DType::kF32, 5);
  const Tensor b = Tensor::full({kBytes / 4}, DType::kF32, 7);
  std::vector<float> got_a, got_b;
  Tape one, two, other;
  const Tensor x = one.input(values<float>({1}));
  const Tensor z = two.input(values<float>({1}));
  const Tensor u = other.input(values<float>({1}));
  const auto keeps = [](OffloadGraph& graph, int layer, const Tensor& in,
                        const Tensor& kept, std::vector<float>* got) {
    const OffloadWindow window(&graph, layer, {kept}, {});
    return hold(in, {kept}, [got](const std::vector<Tensor>& seen) {
      if (got != nullptr) *got = seen[0].to_vector<float>();
    });
  };
  const Tensor y = record(one, [&] { return keeps(first, 0, x, a, &got_a); });
  const Tensor end =
      record(two, [&] { return keeps(first, 1, z, z, nullptr); });
  ParameterGradients grads;
  two.backward(end, grads);
  const Tensor v = record(other, [&] {
    const Tensor h = keeps(second, 0, u, b, &got_b);
    return keeps(second, 1, h, h, nullptr);
  });
  one.backward(y, grads);
  other.backward(v, grads);
  return got_a == std::vector<float>(kBytes / 4, 5) &&
         got_b == std::vector<float>(kBytes / 4, 7);
}

// Three steps of a schedule, and of what else may happen.
Seen run(Timing timing, uint64_t seed, const std::string& schedule,
         bool recompute) {
  FakeDevice fake(timing, seed);
  Seen seen;
  {
    const DeviceScope scope(fake.device());
    Stack stack(4);
    const Stack::Options options = {.offload = all_inputs(),
                                    .recompute = recompute,
                                    .strict = false,
                                    .drop_norms = !recompute,
                                    .keep = {"rms_norm"}};
    for (int step = 0; step < 3; ++step) {
      std::unique_ptr<Stack::Pass> passes[2];
      for (size_t i = 0; i < schedule.size(); i += 3) {
        const int number = schedule[i + 1] - '0';
        const int rows = 16 + 8 * number, start = 100 * (number + 1);
        std::unique_ptr<Stack::Pass>& pass = passes[number];
        if (schedule[i] == 'F') {
          pass = stack.forward(options, rows, start);
        } else if (schedule[i] == 'B') {
          ParameterGradients grads, plain;
          const Stack::Result got = stack.backward(*pass, grads);
          const auto alone = stack.forward({}, rows, start);
          seen.wrong_passes += !same_bits(got, stack.backward(*alone, plain));
          pass.reset();
        } else {
          pass.reset();
        }
      }
      seen.wrong_passes += !cut_short_is_right();
      seen.wrong_passes += !two_stages_are_right();
    }
    EXPECT_GT(fake.copy_out().counts().copies, 0);
  }
  fake.finish();
  fake.device().pool().trim();
  seen.races = fake.races();
  seen.report = fake.report();
  return seen;
}

// B36, B50, B51, B52, B53 and B67.
TEST(Mutation, WholePassesAreOrdered) {
  for (const Timing timing : {Timing::kLate, Timing::kSoon, Timing::kRandom}) {
    for (const char* schedule : kSchedules) {
      for (const bool recompute : {false, true}) {
        SCOPED_TRACE(std::string(schedule) + " at timing " +
                     std::to_string(static_cast<int>(timing)));
        const Seen seen = run(timing, 1, schedule, recompute);
        EXPECT_EQ(seen.races, 0) << seen.report;
        EXPECT_EQ(seen.wrong_passes, 0);
      }
    }
  }
}

// The same without one ordering.
Seen without(Edge edge) {
  drop_edge(edge);
  Seen all;
  for (const Timing timing : {Timing::kLate, Timing::kRandom}) {
    for (const char* schedule : kSchedules) {
      for (const bool recompute : {false, true}) {
        const Seen seen = run(timing, 2, schedule, recompute);
        all.races += seen.races;
        all.wrong_passes += seen.wrong_passes;
      }
    }
  }
  drop_edge(Edge::kNone);
  return all;
}

TEST(MutationDeathTest, EveryOrderingThatIsDroppedIsMissed) {
  for (const Edge edge : kEdges) {
    SCOPED_TRACE(static_cast<int>(edge));
    // A slot without an owner is overwritten, which its generation tells.
    if (edge == Edge::kSlotIsLeased) {
      EXPECT_DEATH(without(edge), "pinned bytes were overwritten");
      continue;
    }
    EXPECT_GT(without(edge).races, 0);
  }
}

}  // namespace
}  // namespace tapeline
