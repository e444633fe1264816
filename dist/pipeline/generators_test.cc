#include "dist/pipeline/generators.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "dist/pipeline/memory.h"
#include "dist/pipeline/operations.h"
#include "dist/pipeline/simulator.h"
#include "dist/pipeline/text.h"
#include "dist/pipeline/validator.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

Schedule make(std::string_view name, int p, int v, int m, int group = 0) {
  const absl::StatusOr<Schedule> s = make_schedule(
      name, {.ranks = p, .chunks = v, .micro_batches = m, .group = group});
  EXPECT_TRUE(s.ok()) << s.status();
  return s.value();
}

// Costs of a rank, shared among its chunks.
struct RankCosts {
  double f = 1, i = 1, w = 1;
  double b() const { return i + w; }
};
const std::vector<RankCosts> kCosts = {
    {1, 1, 1}, {1, 1.25, .75}, {2, 3, 1}, {1, 1, .5}, {1, 1.5, 1}};

double makespan(const Schedule& s, const RankCosts& c = {}, double latency = 0,
                OvRelease release = OvRelease::kEnd) {
  const double v = s.chunks();
  return simulate(s, {.stages = {{.forward = c.f / v,
                                  .input = c.i / v,
                                  .weight = c.w / v}},
                      .latency = latency,
                      .ov_release = release})
      .value()
      .makespan;
}

std::vector<double> peak(const Schedule& s, const Holds& holds = {}) {
  std::vector<double> out;
  for (const Peak& p : peaks(s, {holds})) {
    out.push_back(p.value / s.chunks());
  }
  return out;
}
double worst_peak(const Schedule& s) {
  const std::vector<double> all = peak(s);
  return *std::max_element(all.begin(), all.end());
}

std::string rank_text(const Schedule& s, int rank) {
  std::string out;
  for (const Action& a : s.ranks[rank]) {
    absl::StrAppend(&out, out.empty() ? "" : " ", to_string(a));
  }
  return out;
}

// All sizes a schedule has, up to these.
void for_each_size(std::string_view name, int ranks,
                   const std::vector<int>& micro_batches,
                   const std::function<void(int p, int v, int m)>& f) {
  for (int p = 1; p <= ranks; ++p) {
    for (int v = 1; v <= 4; ++v) {
      for (const int m : micro_batches) {
        if (make_schedule(name, {.ranks = p, .chunks = v, .micro_batches = m})
                .ok()) {
          f(p, v, m);
        }
      }
    }
  }
}

class EveryName : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(, EveryName, testing::ValuesIn(schedule_names()),
                         [](const auto& info) { return "n" + info.param; });

// Bug 7 (torchtitan #775): fewer micro-batches than ranks hung.
TEST_P(EveryName, B07_EverySizeUpTo16RanksRuns) {
  int sizes = 0;
  const std::vector<int> micro_batches = {1,  2,  3,  4,  5,  7,  8, 11,
                                          13, 16, 17, 31, 32, 33, 64};
  for_each_size(GetParam(), 16, micro_batches, [&](int p, int v, int m) {
    ++sizes;
    const Schedule s = make(GetParam(), p, v, m);
    const auto refusal = validate(s);
    EXPECT_FALSE(refusal) << p << " " << v << " " << m << ": "
                          << to_string(*refusal);
    EXPECT_TRUE(min_capacity(s, OvRelease::kEnd).has_value());
  });
  EXPECT_GE(sizes, 16 * 6) << GetParam();
}

// Sums of gradients are added in one order, and so have the same bits.
TEST_P(EveryName, BackwardPassesOfAStageAscend) {
  for_each_size(GetParam(), 6, {1, 5, 13}, [&](int p, int v, int m) {
    const Schedule s = make(GetParam(), p, v, m);
    std::vector<int> inputs(s.stages(), 0), weights(s.stages(), 0);
    for (const std::vector<Action>& actions : s.ranks) {
      for (const Action& a : actions) {
        for (const Pass& b : a.passes()) {
          if (b.makes_input_gradient()) {
            EXPECT_EQ(b.micro_batch, inputs[b.stage]++);
          }
          if (b.makes_weight_gradient()) {
            EXPECT_EQ(b.micro_batch, weights[b.stage]++);
          }
        }
      }
    }
  });
}

TEST_P(EveryName, SizesThatItDoesNotHaveAreRefusedInOneLine) {
  for (int v = 1; v <= 3; ++v) {
    const bool one = GetParam() == "gpipe" || GetParam() == "1f1b" ||
                     GetParam() == "eager_1f1b" || GetParam() == "zb_h2";
    const bool two = GetParam() == "zbv" || GetParam() == "v_half" ||
                     GetParam() == "v_min" || GetParam() == "dualpipev";
    const auto s = make_schedule(GetParam(),
                                 {.ranks = 3, .chunks = v, .micro_batches = 6});
    EXPECT_EQ(s.ok(), !(one && v != 1) && !(two && v != 2)) << v;
    if (!s.ok()) {
      EXPECT_NE(s.status().message().find("chunks"), std::string::npos);
    }
  }
  const auto few = make_schedule(
      GetParam(),
      {.ranks = 3, .chunks = default_chunks(GetParam()), .micro_batches = 5});
  EXPECT_EQ(few.ok(), GetParam() != "dualpipev");
  for (const ScheduleSize& size :
       {ScheduleSize{0, 1, 1}, ScheduleSize{1, 0, 1}, ScheduleSize{1, 1, 0},
        ScheduleSize{-1, 1, 1}, ScheduleSize{1, 1, 1, -1},
        ScheduleSize{int64_t{1} << 62, 1, 1},
        ScheduleSize{1 << 16, 1, 1 << 16}}) {
    EXPECT_FALSE(make_schedule(GetParam(), size).ok());
  }
}

TEST(Generators, AnUnknownNameIsRefusedWithTheNearest) {
  const auto s = make_schedule("interleaved_", {});
  EXPECT_NE(s.status().message().find("did you mean 'interleaved'"),
            std::string::npos);
}

// --- Orders and figures of pipeline schedules in the literature

TEST(Generators, OrdersOfTwoRanks) {
  const Schedule one = make("1f1b", 2, 1, 4);
  EXPECT_EQ(rank_text(one, 0), "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3");
  EXPECT_EQ(rank_text(one, 1), "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3");
  const Schedule two = make("interleaved", 2, 2, 4);
  EXPECT_EQ(rank_text(two, 0),
            "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3");
  EXPECT_EQ(rank_text(two, 1),
            "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3");
  EXPECT_EQ(rank_text(make("zbv", 2, 2, 4), 0),
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 "
            "0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3");
  EXPECT_EQ(rank_text(make("dualpipev", 2, 2, 4), 0),
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 OV(0F3;3B1) OV(3F2;0B0) 3B2 "
            "OV(3F3;0B1) 3B3 0I2 0W2 0I3 0W3");
}

// Bug of torch's Schedule1F1B drawing: the last rank's forward passes were
// numbered from 1.
TEST(Generators, TheLastRanksForwardPassesBeginAtZero) {
  for (int p = 1; p <= 5; ++p) {
    const Schedule s = make("1f1b", p, 1, 3);
    EXPECT_EQ(to_string(s.ranks[p - 1][0]), absl::StrCat(p - 1, "F0"));
  }
}

// Fault 8 of the engine that this answers to: the schedule of the first step
// was kept when the number of micro-batches changed.
TEST(Fault, F08_SchedulesAreFunctionsOfTheSizeAlone) {
  const std::string before = schedule_text(make("1f1b", 3, 1, 8));
  make("1f1b", 3, 1, 5);
  EXPECT_EQ(schedule_text(make("1f1b", 3, 1, 8)), before);
  EXPECT_NE(schedule_text(make("1f1b", 3, 1, 5)), before);
}

TEST(ClosedForm, GPipeAnd1F1BForAnyMicroBatches) {
  for (const RankCosts& c : kCosts) {
    for (int p = 1; p <= 16; ++p) {
      for (const int m : {1, 2, 3, 5, 8, 16, 31, 64}) {
        const double formula = (m + p - 1) * (c.f + c.b());
        EXPECT_NEAR(makespan(make("gpipe", p, 1, m), c), formula, 1e-9);
        EXPECT_NEAR(makespan(make("1f1b", p, 1, m), c), formula, 1e-9);
        EXPECT_NEAR(makespan(make("eager_1f1b", p, 1, m), c), formula, 1e-9);
      }
    }
  }
}

TEST(ClosedForm, InterleavedAndLoopedBfsForWholeGroups) {
  for (const RankCosts& c : kCosts) {
    for (int p = 1; p <= 8; ++p) {
      for (int v = 1; v <= 4; ++v) {
        for (const int rounds : {1, 2, 5}) {
          const int m = rounds * p;
          const double formula =
              m * (c.f + c.b()) + (p - 1) * (c.f + c.b()) / v;
          EXPECT_NEAR(makespan(make("interleaved", p, v, m), c), formula, 1e-9);
          EXPECT_NEAR(makespan(make("looped_bfs", p, v, m), c), formula, 1e-9);
        }
      }
    }
  }
}

TEST(ClosedForm, ZeroBubbleWithEnoughMicroBatches) {
  for (const RankCosts& c : kCosts) {
    for (const int p : {1, 2, 4, 8, 16}) {
      for (const int m : {2 * p, 2 * p + 3, 4 * p}) {
        EXPECT_NEAR(makespan(make("zb1p", p, 1, m), c),
                    m * (c.f + c.b()) + (p - 1) * (c.f + c.i - c.w), 1e-9);
      }
    }
  }
  for (int p = 1; p <= 8; ++p) {
    const int m = 4 * p;
    // At F = I = W nobody idles between its first action and its last.
    for (const char* name : {"zb_h2", "zbv"}) {
      const Schedule s = make(name, p, default_chunks(name), m);
      const Simulation sim = simulate(s, {}).value();
      for (const double idle : sim.idle_inside) {
        EXPECT_NEAR(idle, 0, 1e-9) << name << p;
      }
    }
    EXPECT_NEAR(makespan(make("zb_h2", p, 1, m)), 3 * m + p - 1, 1e-9);
    EXPECT_NEAR(makespan(make("zbv", p, 2, m)), 3 * m + (p - 1) / 2.0, 1e-9);
    EXPECT_NEAR(makespan(make("zb1p", p, 2, m)), 3 * m + (p - 1) / 2.0, 1e-9);
  }
}

// (PP/2-1)(F&B + B - 3W) with costs of a stage, exact for F = I.
TEST(ClosedForm, DualPipeVWhereForwardCostsAsInput) {
  for (const double w : {.5, 1.0}) {
    const RankCosts c{1, 1, w};
    for (int p = 2; p <= 8; p += 2) {
      for (const int m : {2 * p, 2 * p + 3, 4 * p}) {
        const double idle = (p - 1) * ((c.f + c.b()) + c.b() - 3 * c.w) / 2;
        EXPECT_NEAR(makespan(make("dualpipev", p, 2, m), c),
                    m * (c.f + c.b()) + idle, 1e-9)
            << p << " " << m << " " << w;
      }
    }
  }
}

// Bug 45 (zero-bubble #73): the order of warm-up cost idle time.
TEST(ClosedForm, B45_MakespansOfTheLiterature) {
  struct Case {
    int p, m;
    double f1b, int2, int4, zb1p, zb1p2, zbv, fused, serial;
  };
  for (const Case& c :
       {Case{2, 4, 15, 13.5, 12.75, 13, 12.5, 12.5, 13, 12.5},
        Case{4, 8, 33, 28.5, 26.25, 27, 25.5, 25.5, 27, 25.5},
        Case{4, 16, 57, 52.5, 50.25, 51, 49.5, 49.5, 51, 49.5},
        Case{8, 16, 69, 58.5, 53.25, 55, 51.5, 51.5, 55, 51.5},
        Case{8, 32, 117, 106.5, 101.25, 103, 99.5, 99.5, 103, 99.5}}) {
    EXPECT_NEAR(makespan(make("1f1b", c.p, 1, c.m)), c.f1b, 1e-9);
    EXPECT_NEAR(makespan(make("interleaved", c.p, 2, c.m)), c.int2, 1e-9);
    EXPECT_NEAR(makespan(make("interleaved", c.p, 4, c.m)), c.int4, 1e-9);
    EXPECT_NEAR(makespan(make("zb1p", c.p, 1, c.m)), c.zb1p, 1e-9);
    EXPECT_NEAR(makespan(make("zb1p", c.p, 2, c.m)), c.zb1p2, 1e-9);
    EXPECT_NEAR(makespan(make("zbv", c.p, 2, c.m)), c.zbv, 1e-9);
    const Schedule dual = make("dualpipev", c.p, 2, c.m);
    EXPECT_NEAR(makespan(dual), c.fused, 1e-9);
    EXPECT_NEAR(makespan(dual, {}, 0, OvRelease::kEarly), c.serial, 1e-9);
  }
}

TEST(ClosedForm, RaggedGroups) {
  const std::vector<std::pair<int, double>> by_four = {
      {1, 12}, {2, 13.5}, {3, 15}, {5, 24}, {6, 27.5}, {7, 26.5}};
  for (const auto& [m, expected] : by_four) {
    EXPECT_NEAR(makespan(make("interleaved", 4, 2, m)), expected, 1e-9) << m;
  }
  const Schedule six = make("interleaved", 4, 2, 6, 6);
  EXPECT_NEAR(makespan(six), 22.5, 1e-9);
  EXPECT_EQ(peak(six)[0], 6);
}

TEST(ClosedForm, LatencyIsPaidAsMeasured) {
  struct Case {
    const char* name;
    int v;
    double at_0, at_1, at_2, at_4;
  };
  for (const Case& c : {Case{"1f1b", 1, 57, 59.8, 62.6, 68.2},
                        Case{"interleaved", 2, 52.5, 53.9, 55.3, 58.1},
                        Case{"interleaved", 4, 50.25, 53.25, 56.25, 67.95},
                        Case{"zb1p", 1, 51, 52.2, 53.4, 55.8},
                        Case{"zbv", 2, 49.5, 50.8, 52.1, 55.0}}) {
    const Schedule s = make(c.name, 4, c.v, 16);
    EXPECT_NEAR(makespan(s, {}, 0), c.at_0, 1e-9) << c.name << c.v;
    EXPECT_NEAR(makespan(s, {}, .1), c.at_1, 1e-9) << c.name << c.v;
    EXPECT_NEAR(makespan(s, {}, .2), c.at_2, 1e-9) << c.name << c.v;
    EXPECT_NEAR(makespan(s, {}, .4), c.at_4, 1e-9) << c.name << c.v;
  }
  // 1F1B pays in every micro-batch, with a long warm-up only on the way.
  for (const int p : {2, 4, 8}) {
    const int m = 4 * p;
    const double c = .125;
    EXPECT_NEAR(makespan(make("1f1b", p, 1, m), {}, c) -
                    makespan(make("1f1b", p, 1, m)),
                c * (m * (2 - 2.0 / p) + 2 * (p - 2)), 1e-9);
    EXPECT_NEAR(makespan(make("eager_1f1b", p, 1, m), {}, c) -
                    makespan(make("eager_1f1b", p, 1, m)),
                c * 2 * (p - 1), 1e-9);
  }
}

// --- Memory

TEST(Peaks, FollowTheFormulas) {
  for (int p = 1; p <= 16; ++p) {
    for (const int m : {1, 3, 2 * p, 64}) {
      const std::vector<double> one = peak(make("1f1b", p, 1, m));
      const std::vector<double> eager = peak(make("eager_1f1b", p, 1, m));
      const std::vector<double> all = peak(make("gpipe", p, 1, m));
      for (int r = 0; r < p; ++r) {
        EXPECT_EQ(one[r], std::min(m, p - r));
        EXPECT_EQ(eager[r], std::min(m, 2 * (p - r) - 1));
        EXPECT_EQ(all[r], m);
      }
      EXPECT_LE(worst_peak(make("zb1p", p, 1, m)), p);
      EXPECT_LE(worst_peak(make("zb1p", p, 2, m)), p);
      EXPECT_LE(worst_peak(make("zb_h2", p, 1, m)), 2 * p - 1);
      EXPECT_LE(worst_peak(make("zbv", p, 2, m)), p);
      if (m >= 2 * p) {
        EXPECT_LE(worst_peak(make("dualpipev", p, 2, m)), p + .5);
      }
      for (int v = 2; v <= 4 && m % p == 0 && m >= 2 * p; ++v) {
        const std::vector<double> some = peak(make("interleaved", p, v, m));
        for (int r = 0; r < p; ++r) {
          EXPECT_NEAR(some[r], (2 * (p - r - 1) + (v - 1) * p + 1.0) / v, 1e-9);
        }
      }
    }
  }
}

// At p/2+1 and p/3+2 activations they idle about 1/2 and 2/3 as long as 1F1B.
TEST(Peaks, VHalfAndVMinKeepTheirBoundsForAnySize) {
  for (int p = 1; p <= 33; ++p) {
    for (const int m : {1, 2, p, 2 * p, 4 * p, 64}) {
      const Schedule half = make("v_half", p, 2, m);
      const Schedule min = make("v_min", p, 2, m);
      EXPECT_LE(worst_peak(half), p / 2.0 + 1) << p << " " << m;
      EXPECT_LE(worst_peak(min), p / 3.0 + 2) << p << " " << m;
      if (m < 2 * p) continue;
      const double f1b_idle = 3.0 * (p - 1);
      EXPECT_LE(makespan(half) - 3 * m, f1b_idle / 2 + 1e-9) << p << " " << m;
      EXPECT_LE(makespan(min) - 3 * m, f1b_idle * .75 + 1e-9) << p << " " << m;
    }
  }
}

TEST(Peaks, ActivationsFreedAtIAndTheStashOfW) {
  const auto at_i = [](const Schedule& s) { return peak(s, {.stash = 0}); };
  const auto stash = [](const Schedule& s) { return peak(s, {.forward = 0}); };
  using List = std::vector<double>;
  EXPECT_EQ(at_i(make("zb1p", 4, 1, 16)), (List{4, 3, 2, 1}));
  EXPECT_EQ(stash(make("zb1p", 4, 1, 16)), (List{1, 2, 3, 4}));
  EXPECT_EQ(at_i(make("zb_h2", 4, 1, 16)), (List{7, 5, 3, 1}));
  EXPECT_EQ(at_i(make("zbv", 4, 2, 16)), (List{4, 4, 4, 4}));
  EXPECT_EQ(at_i(make("dualpipev", 4, 2, 16)), (List{4.5, 4.5, 4.5, 4.5}));
  EXPECT_EQ(stash(make("1f1b", 4, 1, 16)), (List{0, 0, 0, 0}));
}

// Bug 35 (pytorch #194120, marin #6532): memory grew with the micro-batches.
TEST(Peaks, B35_DoNotGrowWithMicroBatches) {
  for (const char* name : {"1f1b", "eager_1f1b", "interleaved", "zb1p", "zb_h2",
                           "zbv", "v_half", "v_min", "dualpipev"}) {
    const int v = std::max(default_chunks(name), name[0] == 'i' ? 2 : 1);
    EXPECT_EQ(peak(make(name, 4, v, 8)), peak(make(name, 4, v, 64))) << name;
  }
}

// --- Messages

TEST(Messages, AreCounted) {
  using List = std::vector<int>;
  EXPECT_EQ(messages_sent(make("1f1b", 4, 1, 16)), (List{16, 32, 32, 16}));
  EXPECT_EQ(messages_sent(make("interleaved", 4, 2, 16)),
            (List{48, 64, 64, 48}));
  EXPECT_EQ(messages_sent(make("interleaved", 4, 4, 16)),
            (List{112, 128, 128, 112}));
  for (const char* name : {"zbv", "dualpipev"}) {
    EXPECT_EQ(messages_sent(make(name, 4, 2, 16)), (List{32, 64, 64, 32}));
  }
}

// Bug 34 (pytorch #136380): receive buffers for all micro-batches. One shared
// pool needs fewer than the channels' own maxima add up to.
TEST(Messages, B34_SlotsDoNotGrowWithMicroBatches) {
  for (const char* name : {"1f1b", "interleaved", "zb1p", "zbv", "dualpipev"}) {
    const int v = std::max(default_chunks(name), name[0] == 'i' ? 4 : 1);
    const auto slots = [&](int m) {
      return simulate(make(name, 4, v, m), {}).value().slots;
    };
    EXPECT_EQ(slots(16), slots(64)) << name;
    for (const int n : slots(64)) EXPECT_LE(n, 3) << name;
  }
  EXPECT_EQ(simulate(make("looped_bfs", 4, 2, 16), {}).value().slots[0], 12);
  EXPECT_EQ(simulate(make("gpipe", 4, 1, 16), {}).value().slots,
            (std::vector<int>{0, 0, 0, 0}));
}

TEST(Messages, CapacityThatIsEnough) {
  const auto capacity = [](const Schedule& s) {
    return min_capacity(s, OvRelease::kEnd).value();
  };
  for (const int p : {2, 4, 8}) {
    const int m = 4 * p;
    EXPECT_EQ(capacity(make("gpipe", p, 1, m)), 0);
    for (const char* name : {"1f1b", "zb1p", "zb_h2"}) {
      EXPECT_EQ(capacity(make(name, p, 1, m)), 1) << name;
    }
    for (const char* name : {"interleaved", "zbv", "dualpipev"}) {
      EXPECT_EQ(capacity(make(name, p, 2, m)), 1) << name;
    }
    EXPECT_EQ(capacity(make("zb1p", p, 2, m)), p / 2);
    EXPECT_EQ(capacity(make("looped_bfs", p, 2, m)), m / p);
  }
}

TEST(Generators, SmallGroupsRunToo) {
  for (const char* name : {"interleaved", "zb1p"}) {
    for (int p = 1; p <= 9; ++p) {
      for (int v = 1; v <= 3; ++v) {
        for (const int m : {1, 4, 9, 19}) {
          for (int group = 1; group <= p + 2; ++group) {
            const auto refusal = validate(make(name, p, v, m, group));
            EXPECT_FALSE(refusal) << name << " " << p << " " << v << " " << m
                                  << " " << group << to_string(*refusal);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tapeline
