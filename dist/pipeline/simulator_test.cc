#include "dist/pipeline/simulator.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"
#include "dist/pipeline/generators.h"
#include "dist/pipeline/text.h"
#include "gtest/gtest.h"
#include "runtime/random.h"

namespace tapeline {
namespace {

Schedule parse(const std::string& text) {
  return parse_schedule(text, "t").value();
}
constexpr char kTwoRanks[] =
    "schedule v1 ranks 2 stages 2 micro_batches 1 placement 0 1\n";

TEST(Simulator, TimesOfASmallScheduleByHand) {
  const Schedule s =
      parse(absl::StrCat(kTwoRanks, "rank 0: 0F0 0I0 0W0\nrank 1: 1F0 1B0\n"));
  const Simulation sim =
      simulate(s, {.stages = {{.forward = 2, .input = 3, .weight = 4}},
                   .latency = .5})
          .value();
  // 0F0 0-2, 1F0 2.5-4.5, 1B0 4.5-11.5, 0I0 12-15, 0W0 15-19.
  EXPECT_EQ(sim.makespan, 19);
  EXPECT_EQ(sim.actions[1][1].begin, 4.5);
  EXPECT_EQ(sim.actions[0][1].begin, 12);
  EXPECT_EQ(sim.busy, (std::vector<double>{9, 9}));
  EXPECT_EQ(sim.idle, (std::vector<double>{10, 10}));
  EXPECT_EQ(sim.idle_inside, (std::vector<double>{10, 0}));
  EXPECT_NEAR(sim.bubble, 20.0 / 38, 1e-12);
  EXPECT_EQ(sim.slots, (std::vector<int>{0, 0}));
}

TEST(Simulator, WithinARankThereIsNoLatency) {
  const Schedule s = parse(
      "schedule v1 ranks 1 stages 2 micro_batches 1 placement 0 0\n"
      "rank 0: 0F0 1F0 1B0 0B0\n");
  EXPECT_EQ(simulate(s, {.latency = 100}).value().makespan, 6);
}

// Bug 38 (pytorch #136766, torchtitan #773): with I and W apart the forward
// pass was made again twice.
TEST(Simulator, B38_ARecomputedPassIsMadeAgainOnce) {
  for (const char* backward : {"0B0", "0I0 0W0"}) {
    const auto one = [&](const std::string& f) {
      return simulate(
                 parse(absl::StrCat("schedule v1 ranks 1 stages 1 "
                                    "micro_batches 1 placement 0\nrank 0: ",
                                    f, " ", backward, "\n")),
                 {.stages = {{.forward = 5}}})
          .value()
          .makespan;
    };
    EXPECT_EQ(one("0F0"), 7);
    EXPECT_EQ(one("0F0o"), 7);
    EXPECT_EQ(one("0F0r"), 12);
  }
}

TEST(Simulator, OverlappedPairsReleaseAtTheEndOrEarly) {
  const Schedule s = parse(
      "schedule v1 ranks 2 stages 2 micro_batches 2 placement 0 1\n"
      "rank 0: 0F0 OV(0F1;0B0) 0B1\nrank 1: 1F0 1B0 1F1 1B1\n");
  const Simulation end = simulate(s, {}).value();
  // 1B0 ends at 4; OV 4-7, 1F1 7-8, 1B1 8-10, 0B1 10-12.
  EXPECT_EQ(end.makespan, 12);
  EXPECT_EQ(end.busy[0], 6);
  const Simulation early =
      simulate(s, {.ov_release = OvRelease::kEarly}).value();
  // 0F1 1-2, 0B0 4-6; 1F1 4-5, 1B1 5-7, 0B1 7-9.
  EXPECT_EQ(early.makespan, 9);
  EXPECT_EQ(early.busy[0], 6);
  EXPECT_EQ(early.actions[0][1].begin, 1);
  EXPECT_EQ(early.actions[0][1].end, 6);
  // A pair that costs 1.5 instead of 3: each half takes half as long.
  const Simulation fast = simulate(s, {.stages = {{.overlapped = 1.5}},
                                       .ov_release = OvRelease::kEarly})
                              .value();
  EXPECT_EQ(fast.actions[0][1].end, 5);
  EXPECT_EQ(fast.busy[0], 4.5);
}

TEST(Simulator, WhatCannotRunIsRefusedWithTheAction) {
  const auto sim = simulate(
      parse(absl::StrCat(kTwoRanks, "rank 0: 0F0 0B0\nrank 1: 1B0 1F0\n")), {});
  ASSERT_FALSE(sim.ok());
  EXPECT_NE(
      std::string(sim.status().message()).find("cycle: rank 1, action 0 (1B0)"),
      std::string::npos)
      << sim.status();
}

// Bug 9 (Megatron-LM #1810): layers that do not divide. Stages of any cost run,
// and the figures keep their formulas: GPipe exactly, 1F1B as a bound.
TEST(Simulator, B09_UnequalStages) {
  const Random random(1, "stages");
  uint64_t at = 0;
  int equal = 0;
  for (int n = 0; n < 300; ++n) {
    const int p = 1 + static_cast<int>(random.below(7, at++));
    const int m = 1 + static_cast<int>(random.below(20, at++));
    std::vector<StageCosts> stages(p);
    double sum = 0, most = 0, f_most = 0, b_most = 0;
    for (StageCosts& c : stages) {
      c.forward = 1 + static_cast<double>(random.below(9, at++));
      c.backward = 1 + static_cast<double>(random.below(9, at++));
      sum += c.forward + *c.backward;
      most = std::max(most, c.forward + *c.backward);
      f_most = std::max(f_most, c.forward);
      b_most = std::max(b_most, *c.backward);
    }
    const auto makespan = [&](const char* name) {
      const Schedule s =
          make_schedule(name, {.ranks = p, .micro_batches = m}).value();
      return simulate(s, {.stages = stages}).value().makespan;
    };
    EXPECT_NEAR(makespan("gpipe"), sum + (m - 1) * (f_most + b_most), 1e-9);
    const double bound = sum + (m - 1) * most;
    EXPECT_LE(makespan("1f1b"), bound + 1e-9);
    equal += makespan("1f1b") == bound ? 1 : 0;
  }
  EXPECT_GT(equal, 60);  // the bound is often reached
}

}  // namespace
}  // namespace tapeline
