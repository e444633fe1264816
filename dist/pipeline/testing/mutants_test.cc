#include "dist/pipeline/testing/mutants.h"

#include <iostream>

#include "dist/pipeline/generators.h"
#include "dist/pipeline/testing/interpreter.h"
#include "dist/pipeline/text.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

RunResult run(const std::string& text, const RunOptions& options = {}) {
  return interpret(parse_schedule(text, "t").value(), options);
}
constexpr char kHeader[] =
    "schedule v1 ranks 2 stages 2 micro_batches 2 placement 0 1\n";
std::string two_ranks(const std::string& a, const std::string& b) {
  return std::string(kHeader) + "rank 0: " + a + "\nrank 1: " + b + "\n";
}

TEST(Interpreter, SeesWhatGoesWrong) {
  const std::string good = "1F0 1B0 1F1 1B1";
  EXPECT_EQ(run(two_ranks("0F0 0F1 0B0 0B1", good)).outcome, Outcome::kRight);
  EXPECT_EQ(run(two_ranks("0F0 0F1 0B1 0B0", good)).what, "gradients differ");
  EXPECT_EQ(run(two_ranks("0F0 0F1 0B0 0I1", good)).what, "gradients differ");
  EXPECT_EQ(run(two_ranks("0F0 0F1 0B0 0B1 0F1", good)).what,
            "a forward pass again");
  EXPECT_EQ(run(two_ranks("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")).outcome,
            Outcome::kHung);
  EXPECT_EQ(run(two_ranks("0F0 OV(0F1;0B0) 0B1", "1F0 1F1 1B0 1B1")).outcome,
            Outcome::kHung);
  EXPECT_EQ(run(two_ranks("0F0 OV(0F1;0B0) 0B1", "1F0 1F1 1B0 1B1"),
                {.ov_release = OvRelease::kEarly})
                .outcome,
            Outcome::kRight);
  EXPECT_EQ(run("schedule v1 ranks 2 stages 4 micro_batches 1 placement 0 1 1 "
                "0\ngroup a 0 1\ngroup b 3 2\nrank 0: 0F0 3F0 3B0 0B0\n"
                "rank 1: 1F0 2F0 2I0 1B0 2W0\n")
                .what,
            "rank 0 waits in group b");
}

TEST(Interpreter, WeighsWhatIsKept) {
  const std::string text =
      two_ranks("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1B0 1F1 1B1");
  EXPECT_EQ(run(text).most, (std::vector<double>{2, 1}));
  EXPECT_EQ(run(text, {.stash_weight = 3}).most, (std::vector<double>{6, 1}));
  EXPECT_EQ(run(text, {.forward_weight = 2, .stash_weight = 0}).most,
            (std::vector<double>{4, 2}));
}

TEST(Interpreter, RunsEveryGeneratedSchedule) {
  for (const std::string& name : schedule_names()) {
    for (int p = 1; p <= 5; ++p) {
      for (int v = 1; v <= 3; ++v) {
        for (const int m : {1, 3, 10, 13}) {
          const auto s = make_schedule(
              name, {.ranks = p, .chunks = v, .micro_batches = m});
          if (!s.ok()) continue;
          for (const OvRelease r : {OvRelease::kEnd, OvRelease::kEarly}) {
            EXPECT_EQ(interpret(*s, {.ov_release = r}).outcome, Outcome::kRight)
                << name << p << v << m;
          }
        }
      }
    }
  }
}

TEST(ScheduleFuzz, ValidatorAndInterpreterAgree) {
  const FuzzCounts counts = fuzz_schedules(10000, 1, std::cerr);
  EXPECT_EQ(counts.cases, 10000);
  EXPECT_EQ(counts.hung, 0);
  EXPECT_EQ(counts.wrong_gradients, 0);
  EXPECT_EQ(counts.over_budget, 0);
  EXPECT_EQ(counts.rejected_but_ran, 0);
  EXPECT_GE(counts.accepted_reordered, 1000);
  std::cerr << counts.accepted << " accepted, " << counts.accepted_reordered
            << " of them reordered\n";
  for (const char* check :
       {"complete", "channel", "cycle", "memory", "collective"}) {
    EXPECT_GT(counts.rejected.at(check), 0) << check;
    std::cerr << counts.rejected.at(check) << " rejected: " << check << "\n";
  }
}

}  // namespace
}  // namespace tapeline
