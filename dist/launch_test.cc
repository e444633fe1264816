#include "dist/launch.h"

#include <map>
#include <string>

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

absl::StatusOr<Launched> read(const std::map<std::string, std::string>& set) {
  return read_launch(
      [&](const std::string& name) -> std::optional<std::string> {
        const auto found = set.find(name);
        if (found == set.end()) return std::nullopt;
        return found->second;
      });
}

TEST(Launch, AloneWithoutALauncher) {
  const Launched launch = read({{"MASTER_PORT", "x"}}).value();
  EXPECT_EQ(launch.rank, 0);
  EXPECT_EQ(launch.world, 1);
}

TEST(Launch, ReadsEachLaunchersVariables) {
  const std::map<std::string, std::string> master = {{"MASTER_ADDR", "node7"},
                                                     {"MASTER_PORT", "29500"}};
  const std::map<std::string, std::string> launchers[] = {
      {{"RANK", "5"},
       {"WORLD_SIZE", "8"},
       {"LOCAL_RANK", "1"},
       {"LOCAL_WORLD_SIZE", "4"}},
      {{"SLURM_PROCID", "5"},
       {"SLURM_NTASKS", "8"},
       {"SLURM_LOCALID", "1"},
       {"SLURM_NTASKS_PER_NODE", "4"}},
      {{"OMPI_COMM_WORLD_RANK", "5"},
       {"OMPI_COMM_WORLD_SIZE", "8"},
       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}},
  };
  for (std::map<std::string, std::string> set : launchers) {
    set.insert(master.begin(), master.end());
    const Launched launch = read(set).value();
    EXPECT_EQ(launch.rank, 5);
    EXPECT_EQ(launch.world, 8);
    EXPECT_EQ(launch.local_rank, 1);
    EXPECT_EQ(launch.local_world, 4);
    EXPECT_EQ(launch.master, "node7");
    EXPECT_EQ(launch.store_port, 29501);
  }
}

TEST(Launch, OpenMpiCountsInsideASlurmJob) {
  // mpirun in a batch script: Slurm's variables are the script's.
  const Launched launch = read({{"SLURM_PROCID", "0"},
                                {"SLURM_NTASKS", "2"},
                                {"SLURM_LOCALID", "0"},
                                {"SLURM_JOB_ID", "7"},
                                {"OMPI_COMM_WORLD_RANK", "1"},
                                {"OMPI_COMM_WORLD_SIZE", "2"},
                                {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                {"PMIX_NAMESPACE", "prte-1"},
                                {"MASTER_ADDR", "a"},
                                {"MASTER_PORT", "1"}})
                              .value();
  EXPECT_EQ(launch.rank, 1);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.job, "prte-1");
}

TEST(Launch, TheJobsNameCanBeGiven) {
  std::map<std::string, std::string> set = {{"SLURM_PROCID", "0"},
                                            {"SLURM_NTASKS", "2"},
                                            {"MASTER_ADDR", "a"},
                                            {"MASTER_PORT", "1"}};
  EXPECT_EQ(read(set)->job, "");
  set["SLURM_JOB_ID"] = "7";
  EXPECT_EQ(read(set)->job, "7");
  set["TAPELINE_JOB"] = "mine";
  EXPECT_EQ(read(set)->job, "mine");
}

TEST(Launch, TheStoresPortCanBeGiven) {
  EXPECT_EQ(read({{"RANK", "0"},
                  {"WORLD_SIZE", "2"},
                  {"MASTER_ADDR", "a"},
                  {"MASTER_PORT", "1"},
                  {"TAPELINE_STORE_PORT", "77"}})
                .value()
                .store_port,
            77);
}

TEST(Launch, SaysWhatIsWrong) {
  const std::pair<std::map<std::string, std::string>, const char*> cases[] = {
      {{{"RANK", "0"}}, "lacks WORLD_SIZE"},
      {{{"RANK", "2"}, {"WORLD_SIZE", "2"}},
       "RANK is '2', not a number from 0 to 1"},
      {{{"RANK", "x"}, {"WORLD_SIZE", "2"}}, "RANK is 'x'"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE is '0'"},
      {{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}},
       "Slurm started 2 processes, but MASTER_ADDR is not set"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}},
       "lacks MASTER_PORT"},
      {{{"RANK", "0"},
        {"WORLD_SIZE", "2"},
        {"MASTER_ADDR", "a"},
        {"MASTER_PORT", "99999"}},
       "MASTER_PORT is '99999'"},
  };
  for (const auto& [set, what] : cases) {
    const absl::StatusOr<Launched> launch = read(set);
    ASSERT_FALSE(launch.ok());
    EXPECT_TRUE(absl::StrContains(launch.status().message(), what))
        << launch.status();
  }
}

}  // namespace
}  // namespace tapeline
