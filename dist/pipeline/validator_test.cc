#include "dist/pipeline/validator.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "dist/pipeline/generators.h"
#include "dist/pipeline/text.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

Schedule make(std::string_view name, int p, int v, int m) {
  return make_schedule(name, {.ranks = p, .chunks = v, .micro_batches = m})
      .value();
}

// Of two stages on two ranks and two micro-batches.
Schedule two_ranks(const std::string& rank_0, const std::string& rank_1) {
  return parse_schedule(
             absl::StrCat("schedule v1 ranks 2 stages 2 micro_batches 2 "
                          "placement 0 1\nrank 0: ",
                          rank_0, "\nrank 1: ", rank_1, "\n"),
             "t")
      .value();
}

void expect_refused(const Schedule& s, Check check, int rank, int index,
                    const std::string& action, const std::string& part,
                    const Limits& limits = {}) {
  const std::optional<Refusal> refusal = validate(s, limits);
  ASSERT_TRUE(refusal) << schedule_text(s);
  EXPECT_EQ(name_of(refusal->check), name_of(check)) << to_string(*refusal);
  EXPECT_EQ(refusal->rank, rank) << to_string(*refusal);
  EXPECT_EQ(refusal->index, index) << to_string(*refusal);
  EXPECT_EQ(refusal->action, action) << to_string(*refusal);
  EXPECT_NE(refusal->message.find(part), std::string::npos)
      << to_string(*refusal);
  EXPECT_EQ(to_string(*refusal).find('\n'), std::string::npos);
}

constexpr char kGood0[] = "0F0 0F1 0B0 0B1";
constexpr char kGood1[] = "1F0 1B0 1F1 1B1";

TEST(Validator, AcceptsWhatCanRun) {
  EXPECT_FALSE(validate(two_ranks(kGood0, kGood1)));
  EXPECT_FALSE(validate(two_ranks(kGood0, "1F0 1I0 1F1 1I1 1W1 1W0")));
}

// --- complete. torch compares sets, so duplicates pass there.

TEST(Complete, ADuplicateIsNamed) {
  expect_refused(two_ranks("0F0 0F1 0B0 0B1 0B1", kGood1), Check::kComplete, 0,
                 4, "0B1", "twice, first as action 3");
  expect_refused(two_ranks("0F0 0F1 0F1 0B0 0B1", kGood1), Check::kComplete, 0,
                 2, "0F1", "twice");
}

TEST(Complete, AMissingPassIsNamed) {
  expect_refused(two_ranks("0F0 0F1 0B0", kGood1), Check::kComplete, 0, 3,
                 "0B1", "missing");
  expect_refused(two_ranks("0F0 0B0 0B1", kGood1), Check::kComplete, 0, 3,
                 "0F1", "missing");
  expect_refused(two_ranks("0F0 0F1 0B0 0I1", kGood1), Check::kComplete, 0, 4,
                 "0W1", "missing");
  expect_refused(two_ranks("0F0 0F1 0B0 0W1", kGood1), Check::kComplete, 0, 4,
                 "0I1", "missing");
  expect_refused(two_ranks("", kGood1), Check::kComplete, 0, 0, "0F0",
                 "missing");
}

TEST(Complete, BAndItsHalvesExcludeEachOther) {
  expect_refused(two_ranks("0F0 0F1 0B0 0B1 0W1", kGood1), Check::kComplete, 0,
                 3, "0B1", "I and W");
}

TEST(Complete, NumbersAndPlacesAreChecked) {
  expect_refused(two_ranks("0F0 0F1 0B0 0B1 0F2", kGood1), Check::kComplete, 0,
                 4, "0F2", "micro-batches 0 to 1");
  expect_refused(two_ranks("0F0 0F1 0B0 0B1 2F0", kGood1), Check::kComplete, 0,
                 4, "2F0", "stages 0 to 1");
  expect_refused(two_ranks("0F0 0F1 0B0 0B1 1F0", "1B0 1F1 1B1"),
                 Check::kComplete, 0, 4, "1F0", "stage 1 is on rank 1");
}

// Bug 45 (torchtitan #774): ZBV was run with another map of stages to ranks.
TEST(Complete, B45_PlacementIsPartOfTheSchedule) {
  Schedule s = make("zbv", 2, 2, 4);
  s.placement = loop_placement(2, 2);
  expect_refused(s, Check::kComplete, 0, 3, "3F0", "stage 3 is on rank 1");
}

// --- channel

TEST(Channel, ReceiversTakeMessagesInTheSendersOrder) {
  expect_refused(two_ranks("0F0 0F1 0B1 0B0", kGood1), Check::kChannel, 0, 2,
                 "0B1",
                 "message 0 from rank 1 is the gradient of stage 1, "
                 "micro-batch 0; it wants");
  expect_refused(two_ranks(kGood0, "1F1 1F0 1B0 1B1"), Check::kChannel, 1, 0,
                 "1F1", "is the output of stage 0, micro-batch 0");
}

TEST(Channel, StagesOfOneRankHandOverInAnyOrder) {
  Schedule s =
      parse_schedule(
          "schedule v1 ranks 1 stages 2 micro_batches 2 placement 0 0\n"
          "rank 0: 0F0 0F1 1F1 1F0 1B0 1B1 0B1 0B0\n",
          "t")
          .value();
  EXPECT_FALSE(validate(s));
}

// Bug 4 (pytorch #195760, #196666): one queue for all that a rank sends
// another.
TEST(Channel, B04_OneQueuePerPairOfRanksMixesMessagesUp) {
  const Limits pairs{.queue_per_rank_pair = true};
  const std::vector<Schedule> mixed = {
      make("zbv", 2, 2, 4), make("zbv", 4, 2, 8), make("dualpipev", 4, 2, 8),
      make("zb1p", 2, 2, 8)};
  for (const Schedule& s : mixed) {
    EXPECT_FALSE(validate(s));
    const auto refusal = validate(s, pairs);
    ASSERT_TRUE(refusal);
    EXPECT_EQ(refusal->check, Check::kChannel);
  }
  expect_refused(make("zbv", 2, 2, 4), Check::kChannel, 1, 4, "2I0",
                 "message 2 from rank 0 is the output of stage 0, micro-batch "
                 "2; it wants the gradient of stage 3, micro-batch 0",
                 pairs);
  EXPECT_FALSE(validate(make("1f1b", 4, 1, 8), pairs));
}

// Bug 6 (Megatron-LM #750): with two ranks the next is also the previous one.
TEST(Channel, B06_TwoRanksWithManyStagesKeepTheirEdgesApart) {
  for (int v = 2; v <= 4; ++v) {
    EXPECT_FALSE(validate(make("interleaved", 2, v, 6)));
  }
  // Stage 2 takes what stage 1 sent for stage 2, never what stage 1 sends back.
  Schedule s = make("interleaved", 2, 2, 2);
  std::swap(s.ranks[1][0], s.ranks[1][1]);
  expect_refused(s, Check::kChannel, 1, 0, "1F1", "the output of stage 0");
}

// --- cycle

TEST(Cycle, BackwardBeforeForward) {
  expect_refused(two_ranks(kGood0, "1B0 1F0 1F1 1B1"), Check::kCycle, 1, 0,
                 "1B0", "it waits for 1F0 on rank 1, which follows 1B0");
  expect_refused(two_ranks(kGood0, "1F0 1W0 1I0 1F1 1B1"), Check::kCycle, 1, 1,
                 "1W0", "it waits for 1I0");
}

TEST(Cycle, RanksThatWaitForEachOther) {
  expect_refused(two_ranks("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), Check::kCycle,
                 0, 1, "0B0",
                 "it waits for 1B0 on rank 1, which follows 1F1 on rank 1, "
                 "which waits for 0F1 on rank 0, which follows 0B0 on rank 0");
}

TEST(Cycle, AnOverlappedPairWaitsForBothInputs) {
  // The gradient of stage 1 comes only after its forward pass of 0F1's output.
  const Schedule s = two_ranks("0F0 OV(0F1;0B0) 0B1", "1F0 1F1 1B0 1B1");
  expect_refused(s, Check::kCycle, 0, 1, "OV(0F1;0B0)", "it waits for 1B0");
  EXPECT_FALSE(validate(s, {.ov_release = OvRelease::kEarly}));
  const Schedule self =
      parse_schedule(
          "schedule v1 ranks 1 stages 1 micro_batches 1 placement 0\n"
          "rank 0: OV(0F0;0B0)\n",
          "t")
          .value();
  expect_refused(self, Check::kCycle, 0, 0, "OV(0F0;0B0)",
                 "it waits for itself");
}

// Bug 1 (Megatron-LM #5100): an exchange in one fixed order on all ranks hung
// at four. Without buffers 1F1B in its plain order hangs; one place is enough.
TEST(Cycle, B01_WithoutBuffersThePlainOrderOf1F1BHangs) {
  const Schedule s = make("1f1b", 4, 1, 8);
  const auto refusal = validate(s, {.capacity = 0});
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->check, Check::kCycle);
  EXPECT_FALSE(validate(s, {.capacity = 1}));
  EXPECT_FALSE(validate(make("gpipe", 4, 1, 8), {.capacity = 0}));
  const Schedule wide = make("looped_bfs", 4, 2, 16);
  EXPECT_TRUE(validate(wide, {.capacity = 3}));
  EXPECT_FALSE(validate(wide, {.capacity = 4}));
}

// Bug 3 (pytorch #172668): a rank sends 2F1, runs and sends 0F2 and receives
// 2B0 while its peer sends 3B0 and then receives 1F2.
TEST(Cycle, B03_AHeadOfLineNeedsProgressByEdge) {
  const Schedule s =
      parse_schedule(
          "schedule v1 ranks 2 stages 4 micro_batches 3 placement 0 1 0 1\n"
          "rank 0: 0F0 2F0 0F1 2F1 0F2 2B0 2F2 0B0 2B1 0B1 2B2 0B2\n"
          "rank 1: 1F0 3F0 1F1 3B0 3F1 1F2 3B1 1B0 3F2 3B2 1B1 1B2\n",
          "t")
          .value();
  expect_refused(s, Check::kCycle, 1, 3, "3B0", "it waits for 0F2 on rank 0",
                 {.capacity = 0});
  EXPECT_FALSE(validate(s, {.capacity = 1}));
  EXPECT_FALSE(validate(s));
}

TEST(Cycle, LongOnesArePrintedInPart) {
  Schedule s = make("1f1b", 16, 1, 40);
  std::swap(s.ranks[15][1], s.ranks[15][2]);  // 15F0 15F1 15B0 …
  for (int r = 0; r < 15; ++r) {
    auto& list = s.ranks[r];
    std::rotate(list.begin() + 1,
                std::find(list.begin(), list.end(),
                          Action(pass(PassKind::kBackward, r, 0))),
                list.end());
  }
  const auto refusal = validate(s);
  ASSERT_TRUE(refusal);
  EXPECT_LT(to_string(*refusal).size(), 1000u);
}

// --- order of sums, which is no part of being valid

TEST(Order, WeightGradientsOfAStageAscend) {
  const auto order = [](const std::string& passes) {
    const Schedule s = parse_schedule(
                           "schedule v1 ranks 1 stages 1 micro_batches 3 "
                           "placement 0\nrank 0: 0F0 0F1 0F2 " +
                               passes,
                           "t")
                           .value();
    EXPECT_FALSE(validate(s));
    const auto refusal = check_order_of_sums(s);
    return refusal ? to_string(*refusal) : "";
  };
  EXPECT_EQ(order("0B0 0B1 0B2"), "");
  EXPECT_EQ(order("0I2 0I0 0I1 0W0 0W1 0W2"), "");
  EXPECT_EQ(order("0I1 0B0 0W1 0B2"), "");
  EXPECT_TRUE(order("0B0 0B2 0B1")
                  .starts_with("order: rank 0, action 5 (0B1): it comes after "
                               "that of micro-batch 2"));
  EXPECT_TRUE(order("0I0 0I1 0I2 0W1 0W0 0W2")
                  .starts_with("order: rank 0, action 7 (0W0)"));
  EXPECT_TRUE(
      order("0I0 0B1 0W0 0B2").starts_with("order: rank 0, action 5 (0W0)"));
}

// --- memory

TEST(Memory, TheActionThatPeaksIsNamed) {
  const Schedule s = make("1f1b", 4, 1, 8);
  EXPECT_FALSE(validate(s, {.budget = {4}}));
  EXPECT_FALSE(validate(s, {.budget = {4, 3, 2, 1}}));
  expect_refused(s, Check::kMemory, 0, 3, "0F3",
                 "keeps 4 here, more than its 3", {.budget = {3}});
  expect_refused(s, Check::kMemory, 2, 1, "2F1", "", {.budget = {4, 3, 1, 1}});
}

TEST(Memory, StagesMayDiffer) {
  const Schedule s = two_ranks(kGood0, kGood1);
  EXPECT_FALSE(validate(s, {.budget = {20}, .holds = {{10}, {20}}}));
  expect_refused(s, Check::kMemory, 1, 0, "1F0", "",
                 {.budget = {20}, .holds = {{10}, {21}}});
}

TEST(Memory, TheStashOfDelayedWeightsCounts) {
  const Schedule s = make("zb1p", 4, 1, 8);
  EXPECT_FALSE(validate(s, {.budget = {4}}));
  const auto refusal = validate(s, {.budget = {4}, .holds = {{1, 0, 2}}});
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->check, Check::kMemory);
  EXPECT_EQ(refusal->action.find('F'), std::string::npos);
}

TEST(Memory, RecomputedPassesAreWholeOnlyInTheirBackwardPass) {
  const Schedule s = two_ranks("0F0r 0F1o 0B0 0B1", kGood1);
  const Limits limits{.budget = {12}, .holds = {{10, 1, 10}}};
  // Two inputs of 1, then one whole and one input.
  EXPECT_FALSE(validate(s, limits));
  expect_refused(two_ranks("0F0r 0F1 0B0 0B1", kGood1), Check::kMemory, 0, 2,
                 "0B0", "keeps 20", limits);
}

// --- collective

// Bug 12 (Neuron_SP #51): a reduction that only one side entered, or in
// another order.
TEST(Collective, B12_GroupsAreEnteredInOneOrder) {
  const std::string header =
      "schedule v1 ranks 2 stages 4 micro_batches 1 placement 0 1 1 0\n"
      "group a 0 1\ngroup b 3 2\n";
  const std::string rank_0 = "rank 0: 0F0 3F0 3B0 0B0\n";
  EXPECT_FALSE(validate(
      parse_schedule(header + rank_0 + "rank 1: 1F0 2F0 2B0 1B0\n", "t")
          .value()));
  // The W of stage 2 waits until after stage 1's.
  expect_refused(
      parse_schedule(header + rank_0 + "rank 1: 1F0 2F0 2I0 1B0 2W0\n", "t")
          .value(),
      Check::kCollective, 0, 2, "3B0", "the reduction of b");
}

TEST(Collective, ThreeGroupsInARing) {
  const auto ring = [](const std::string& last) {
    return parse_schedule(
               absl::StrCat("schedule v1 ranks 3 stages 6 micro_batches 1 "
                            "placement 0 0 1 1 2 2\n"
                            "group a 0 2\ngroup b 3 4\ngroup c 5 1\n"
                            "rank 0: 0F0 1F0 1I0 0B0 1W0\n"
                            "rank 1: 2F0 3F0 3I0 2I0 3W0 2W0\n",
                            last),
               "t")
        .value();
  };
  // Rank 0 enters a then c, rank 1 b then a, rank 2 c then b.
  EXPECT_TRUE(validate(ring("rank 2: 4F0 5F0 5B0 4B0\n")));
  EXPECT_EQ(validate(ring("rank 2: 4F0 5F0 5B0 4B0\n"))->check,
            Check::kCollective);
  EXPECT_FALSE(validate(ring("rank 2: 4F0 5F0 5I0 4B0 5W0\n")));
}

TEST(Collective, B12_TiedEndsRunOnAnyNumberOfRanks) {
  for (const int p : {1, 2, 4}) {
    for (const char* name : {"1f1b", "zb1p", "zbv", "dualpipev"}) {
      Schedule s = make(name, p, default_chunks(name), 2 * p);
      s.groups = {{"tied", {0, s.stages() - 1}},
                  {"depths", {s.stages() - 1, 0}}};
      EXPECT_FALSE(validate(s)) << name << p;
    }
  }
}

}  // namespace
}  // namespace tapeline
