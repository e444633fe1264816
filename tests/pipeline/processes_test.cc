// Pipelines of processes over TCP, started with torchrun's variables and no
// launcher: the bits of the plain loop, and what survivors of a fault do.
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dist/pipeline/generators.h"
#include "dist/pipeline/operations.h"
#include "dist/pipeline/testing/micro_model.h"
#include "dist/pipeline/text.h"
#include "gtest/gtest.h"
#include "tests/pipeline/job.h"

namespace tapeline {
namespace {

constexpr const char* kWorker = "tests/pipeline/process_worker";
constexpr int kRanks = 4;

// With the fault on rank `faulty`.
std::vector<Ended> run_faulty(const Schedule& schedule, double deadline,
                              int faulty = -1, const std::string& fault = "") {
  const std::string file = new_folder() + "/schedule.txt";
  std::ofstream(file) << schedule_text(schedule);
  const bool stalls = absl::StartsWith(fault, "stall");
  return run_job(
      kRanks,
      [&](int rank, const std::string& out) -> std::vector<std::string> {
        return {kWorker,
                "--schedule",
                file,
                "--out",
                out,
                "--deadline",
                absl::StrCat(deadline),
                "--fault",
                rank == faulty ? fault : ""};
      },
      stalls ? faulty : -1);
}

std::map<std::string, std::vector<float>> parse(const std::string& result) {
  std::map<std::string, std::vector<float>> out;
  std::istringstream lines(result);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    std::string name;
    fields >> name;
    for (std::string value; fields >> value;) {
      out[name].push_back(std::strtof(value.c_str(), nullptr));
    }
  }
  return out;
}

TEST(Processes, HaveTheBitsOfThePlainLoop) {
  const struct {
    const char* name;
    int chunks, micro_batches;
  } cases[] = {{"1f1b", 1, 9},       {"interleaved", 2, 8}, {"zb1p", 1, 3},
               {"zbv", 2, 8},        {"v_min", 2, 5},       {"gpipe", 1, 6},
               {"looped_bfs", 2, 4}, {"dualpipev", 2, 8}};
  for (const auto& of : cases) {
    SCOPED_TRACE(of.name);
    const Schedule schedule = with_tied_ends(
        make_schedule(of.name, {kRanks, of.chunks, of.micro_batches}).value());
    const MicroResult want = micro_loop(schedule.stages(), of.micro_batches);
    const std::vector<Ended> got = run_faulty(schedule, 60);
    const std::vector<int> sent = messages_sent(schedule);
    std::map<std::string, std::vector<float>> gradients;
    std::vector<float> losses(of.micro_batches, 0);
    for (int r = 0; r < kRanks; ++r) {
      ASSERT_EQ(got[r].code, 0) << got[r].err;
      auto mine = parse(got[r].out);
      EXPECT_EQ(mine["sent"][0], static_cast<float>(sent[r]));
      ASSERT_EQ(mine["losses"].size(), losses.size());
      for (size_t j = 0; j < losses.size(); ++j) losses[j] += mine["losses"][j];
      mine.erase("sent");
      mine.erase("losses");
      for (const auto& [name, gradient] : mine) {
        const auto [at, fresh] = gradients.emplace(name, gradient);
        EXPECT_EQ(at->second, gradient) << name;
      }
    }
    EXPECT_EQ(losses, want.losses);
    EXPECT_EQ(gradients, want.gradients);
  }
}

// Every survivor ends by itself, in time, with code 72, and says where it was
// and whom it missed.
void expect_survivors(const std::vector<Ended>& got, int faulty,
                      double deadline, bool all_fail) {
  for (int r = 0; r < kRanks; ++r) {
    if (r == faulty && !all_fail) continue;
    EXPECT_EQ(got[r].code, 72) << "rank " << r << ": " << got[r].err;
    EXPECT_LT(got[r].seconds, deadline + 10) << "rank " << r;
    EXPECT_TRUE(
        absl::StrContains(got[r].err, absl::StrCat("rank ", r, ", action ")))
        << got[r].err;
    EXPECT_TRUE(absl::StrContains(got[r].err, "from rank ") ||
                absl::StrContains(got[r].err, "to rank "))
        << got[r].err;
  }
}

Schedule job_schedule() {
  return with_tied_ends(make_schedule("1f1b", {kRanks, 1, 8}).value());
}

TEST(Processes, ARankThatIsKilledEndsTheOthers) {
  const std::vector<Ended> got = run_faulty(job_schedule(), 5, 2, "kill:2:3");
  EXPECT_EQ(got[2].code, -1);
  expect_survivors(got, 2, 5, /*all_fail=*/false);
}

TEST(Processes, ARankThatStallsIsNamed) {
  const std::vector<Ended> got = run_faulty(job_schedule(), 4, 1, "stall:1:2");
  expect_survivors(got, 1, 4, /*all_fail=*/false);
  bool named = false;
  for (int r = 0; r < kRanks; ++r) {
    named |= absl::StrContains(got[r].err, "rank 1: action 2 of 16 (1F2)");
  }
  EXPECT_TRUE(named) << got[0].err << got[2].err;
}

TEST(Processes, AMessageThatIsCutShortIsFound) {
  const std::vector<Ended> got =
      run_faulty(job_schedule(), 8, 1, "truncate:3:0");
  expect_survivors(got, 1, 8, /*all_fail=*/true);
  bool found = false;
  for (int r = 0; r < kRanks; ++r) {
    found |= absl::StrContains(got[r].err, "was cut short");
  }
  EXPECT_TRUE(found);
}

TEST(Processes, AnotherShapeIsFound) {
  const std::vector<Ended> got = run_faulty(job_schedule(), 8, 2, "shape:2:0");
  expect_survivors(got, 2, 8, /*all_fail=*/true);
  EXPECT_TRUE(
      absl::StrContains(got[2].err,
                        "rank 2: receive from rank 1, channel 2, micro-batch 0 "
                        "expects f32[5, 4] i32[2], but was sent"))
      << got[2].err;
}

}  // namespace
}  // namespace tapeline
