#include "dist/pipeline/lowering.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dist/pipeline/generators.h"
#include "dist/pipeline/operations.h"
#include "dist/pipeline/simulator.h"
#include "dist/pipeline/text.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

Schedule parse(const std::string& text) {
  return parse_schedule(text, "test").value();
}

// Every name at many sizes.
void for_each_schedule(const std::function<void(const Schedule&)>& f) {
  for (const std::string& name : schedule_names()) {
    for (const int p : {1, 2, 3, 4, 6}) {
      for (const int v : {1, 2, 3}) {
        for (const int m : {1, 2, 3, 5, 8, 13}) {
          const auto made = make_schedule(name, {p, v, m});
          if (!made.ok()) continue;
          SCOPED_TRACE(absl::StrCat(name, " p ", p, " v ", v, " m ", m));
          f(*made);
        }
      }
    }
  }
}

int count(const RankProgram& program, Instruction::Kind kind) {
  return static_cast<int>(
      std::count_if(program.instructions.begin(), program.instructions.end(),
                    [&](const Instruction& i) { return i.kind == kind; }));
}

TEST(Lowering, IsAListThatCanBeRead) {
  const auto good = lower(
      parse("schedule v1 ranks 2 stages 3 micro_batches 2 placement 0 1 1\n"
            "group tied 0 2\n"
            "rank 0: 0F0 0F1 0B0 0I1 0W1\n"
            "rank 1: 1F0 2F0 OV(1F1;2B0) 1B0 2F1 2B1 1B1\n"));
  ASSERT_TRUE(good.ok()) << good.status();
  EXPECT_EQ(program_text((*good)[0]),
            "ask gradient 1.0 of rank 1 slot 0\n"
            "run 0F0\n"
            "send output 0.0 to rank 1\n"
            "run 0F1\n"
            "send output 0.1 to rank 1\n"
            "take gradient 1.0 of rank 1 slot 0\n"
            "ask gradient 1.1 of rank 1 slot 0\n"
            "run 0B0\n"
            "free 0.0\n"
            "take gradient 1.1 of rank 1 slot 0\n"
            "run 0I1\n"
            "run 0W1\n"
            "free 0.1\n"
            "reduce stage 0\n"
            "offer group 0\n"
            "collect group 0\n");
  EXPECT_EQ(program_text((*good)[1]),
            "ask output 0.0 of rank 0 slot 0\n"
            "take output 0.0 of rank 0 slot 0\n"
            "ask output 0.1 of rank 0 slot 0\n"
            "run 1F0\n"
            "hand output 1.0 to stage 2\n"
            "run 2F0\n"
            "take output 0.1 of rank 0 slot 0\n"
            "run 1F1\n"
            "hand output 1.1 to stage 2\n"
            "run 2B0\n"
            "free 2.0\n"
            "hand gradient 2.0 to stage 1\n"
            "run 1B0\n"
            "free 1.0\n"
            "send gradient 1.0 to rank 0\n"
            "run 2F1\n"
            "run 2B1\n"
            "free 2.1\n"
            "hand gradient 2.1 to stage 1\n"
            "reduce stage 2\n"
            "offer group 0\n"
            "run 1B1\n"
            "free 1.1\n"
            "send gradient 1.1 to rank 0\n"
            "reduce stage 1\n"
            "collect group 0\n");
}

TEST(Lowering, RunsEveryPassOnceInOrderAndSendsWhatTheScheduleDoes) {
  for_each_schedule([&](const Schedule& s) {
    const auto programs = lower(s);
    ASSERT_TRUE(programs.ok()) << programs.status();
    const std::vector<int> sent = messages_sent(s);
    for (size_t r = 0; r < s.ranks.size(); ++r) {
      std::vector<Pass> want, got;
      for (const Action& action : s.ranks[r]) {
        for (const Pass& p : action.passes()) want.push_back(p);
      }
      for (const Instruction& i : (*programs)[r].instructions) {
        if (i.kind == Instruction::kRun) got.push_back(i.pass);
      }
      EXPECT_EQ(got, want);
      EXPECT_EQ(count((*programs)[r], Instruction::kSend), sent[r]);
      int frees = 0;
      for (const Pass& p : want) frees += p.makes_weight_gradient() ? 1 : 0;
      EXPECT_EQ(count((*programs)[r], Instruction::kFree), frees);
    }
  });
}

// What is sent on a channel is taken from it, in the same order; each message
// is asked for once, before, into a slot that is free.
TEST(Lowering, ChannelsAgreeAndSlotsHoldOneMessage) {
  for_each_schedule([&](const Schedule& s) {
    const auto programs = lower(s);
    ASSERT_TRUE(programs.ok());
    std::map<int, std::vector<int>> sent, taken, asked;
    for (size_t r = 0; r < s.ranks.size(); ++r) {
      std::map<int, std::tuple<int, int>> held;
      for (const Instruction& i : (*programs)[r].instructions) {
        const int channel = channel_of(i.value);
        if (i.kind == Instruction::kSend) {
          sent[channel].push_back(i.micro_batch);
        } else if (i.kind == Instruction::kAsk) {
          asked[channel].push_back(i.micro_batch);
          EXPECT_LT(i.slot, (*programs)[r].slots);
          EXPECT_TRUE(
              held.emplace(i.slot, std::tuple(channel, i.micro_batch)).second);
        } else if (i.kind == Instruction::kTake) {
          taken[channel].push_back(i.micro_batch);
          EXPECT_EQ(held.at(i.slot), std::tuple(channel, i.micro_batch));
          held.erase(i.slot);
        }
      }
      EXPECT_TRUE(held.empty());
    }
    EXPECT_EQ(sent, taken);
    EXPECT_EQ(sent, asked);
  });
}

// The colouring is as good as the sweep over the same intervals, where those
// that are used as they arrive need a place for that instant.
TEST(Slots, AreThoseOfTheSimulation) {
  int most = 0, instants = 0;
  for_each_schedule([&](const Schedule& s) {
    for (const double latency : {0.0, 0.2, 1.5}) {
      Costs costs;
      costs.latency = latency;
      costs.ov_release = OvRelease::kEarly;
      const Simulation simulation = simulate(s, costs).value();
      const auto programs = lower(s, costs);
      ASSERT_TRUE(programs.ok());
      for (size_t r = 0; r < s.ranks.size(); ++r) {
        const int slots = (*programs)[r].slots;
        const int column = simulation.slots[r];
        const bool any = count((*programs)[r], Instruction::kTake) > 0;
        // Overlap with each message at the instant of its use.
        int wanted = std::max(column, any ? 1 : 0);
        for (const Waiting& w : simulation.waiting[r]) {
          if (w.span.end - w.span.begin > 1e-7) continue;
          int others = 0;
          for (const Waiting& o : simulation.waiting[r]) {
            others += o.span.begin < w.span.begin - 1e-7 &&
                      o.span.end > w.span.begin + 1e-7;
          }
          wanted = std::max(wanted, others + 1);
        }
        EXPECT_EQ(slots, wanted) << "rank " << r << " latency " << latency;
        EXPECT_GE(slots, column);
        EXPECT_LE(slots, column + 1);
        most = std::max(most, slots);
        instants += slots > std::max(column, 1);
      }
    }
  });
  EXPECT_GT(most, 2);
  EXPECT_GT(instants, 0);
}

TEST(Slots, B34_DoNotGrowWithMicroBatches) {
  for (const std::string& name : schedule_names()) {
    if (name == "gpipe" || name == "looped_bfs") continue;  // all at once
    const int v = std::max(default_chunks(name), name == "interleaved" ? 4 : 1);
    const auto few = lower(make_schedule(name, {4, v, 16}).value());
    const auto many = lower(make_schedule(name, {4, v, 64}).value());
    for (size_t r = 0; r < 4; ++r) {
      EXPECT_LE((*many)[r].slots, (*few)[r].slots + 1) << name << " rank " << r;
      EXPECT_LE((*many)[r].slots, 9) << name;
    }
  }
}

// Sums leave as soon as the rank has nothing to add to them, and are waited for
// at the end alone: a rank that waited earlier could be waited for.
TEST(Groups, B12_AreOfferedAfterTheLastPassAndCollectedAtTheEnd) {
  for (const char* name : {"1f1b", "interleaved", "zb1p", "zbv", "gpipe"}) {
    for (const int p : {1, 2, 3, 4}) {
      const int v = std::max(default_chunks(name), 1);
      Schedule s = make_schedule(name, {p, v, 5}).value();
      if (s.stages() < 2) continue;
      s.groups.push_back({"tied", {0, s.stages() - 1}});
      const auto programs = lower(s);
      ASSERT_TRUE(programs.ok()) << programs.status();
      const bool crosses = s.placement.front() != s.placement.back();
      for (int r = 0; r < p; ++r) {
        const auto& all = (*programs)[r].instructions;
        const bool member =
            crosses && (s.placement.front() == r || s.placement.back() == r);
        EXPECT_EQ(count((*programs)[r], Instruction::kOffer), member);
        EXPECT_EQ(count((*programs)[r], Instruction::kCollect), member);
        bool offered = false;
        for (size_t i = 0; i < all.size(); ++i) {
          offered |= all[i].kind == Instruction::kOffer;
          if (all[i].kind == Instruction::kCollect) {
            EXPECT_EQ(i + 1, all.size());
          }
          if (all[i].kind == Instruction::kRun &&
              all[i].pass.makes_weight_gradient() &&
              (all[i].stage == 0 || all[i].stage == s.stages() - 1)) {
            EXPECT_FALSE(offered) << name << " rank " << r;
          }
        }
      }
    }
  }
}

TEST(Reduction, FollowsTheLastWeightGradientOfItsStage) {
  for_each_schedule([&](const Schedule& s) {
    const auto programs = lower(s);
    for (size_t r = 0; r < s.ranks.size(); ++r) {
      std::map<int, int> left;
      for (const Action& action : s.ranks[r]) {
        for (const Pass& p : action.passes()) {
          left[p.stage] += p.makes_weight_gradient() ? 1 : 0;
        }
      }
      std::set<int> reduced;
      for (const Instruction& i : (*programs)[r].instructions) {
        if (i.kind == Instruction::kRun && i.pass.makes_weight_gradient()) {
          --left[i.stage];
        }
        if (i.kind != Instruction::kReduce) continue;
        EXPECT_EQ(left.at(i.stage), 0);
        EXPECT_TRUE(reduced.insert(i.stage).second);
      }
      EXPECT_EQ(reduced.size(), left.size());
    }
  });
}

TEST(Refused, WhatTheValidatorRefuses) {
  const auto programs =
      lower(parse("schedule v1 ranks 2 stages 2 micro_batches 1 placement 0 1\n"
                  "rank 0: 0B0 0F0\nrank 1: 1F0 1B0\n"));
  ASSERT_FALSE(programs.ok());
  EXPECT_TRUE(absl::StrContains(programs.status().message(), "cycle"))
      << programs.status();
}

}  // namespace
}  // namespace tapeline
