// Passes with windows, under a checker of orders and at any time of completion:
// nothing is read before it is there or overwritten while it is read. That each
// ordering is needed is mutation_test.cc's.
#include <memory>
#include <string>
#include <vector>

#include "autograd/offload_test_ops.h"
#include "gtest/gtest.h"
#include "runtime/fake_device.h"

namespace tapeline {
namespace {

using test_ops::all_inputs;
using test_ops::same_bits;
using test_ops::Stack;

// Passes 0 and 1: F forward, B backward, D neither finished nor wanted.
constexpr const char* kSchedules[] = {"F0 B0 F1 B1", "F0 F1 B0 B1",
                                      "F0 F1 B1 B0", "F0 D0 F1 B1"};

struct Seen {
  int64_t races = 0, wrong_passes = 0;
  std::string report;
};

// Three steps of a schedule.
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
TEST(Order, WholePassesAreOrdered) {
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

}  // namespace
}  // namespace tapeline
