#include "tools/train/spawn.h"

#include <csignal>

#include "gtest/gtest.h"
#include "tools/train/exit_code.h"

namespace tapeline {
namespace {

constexpr int kKilled = 128 + SIGKILL;

TEST(Spawn, TheFirstCodeIsTheJobs) {
  EXPECT_EQ(code_of_job(0, kExitDisk, false), kExitDisk);
  EXPECT_EQ(code_of_job(kExitDisk, kExitNotFinite, false), kExitDisk);
  EXPECT_EQ(code_of_job(kExitDisk, kExitCommunication, false), kExitDisk);
  EXPECT_EQ(code_of_job(kKilled, kExitCommunication, false), kKilled);
}

// The system closes a dying process's sockets before it can be waited for.
TEST(Spawn, WhoMissedAnotherIsNotTheCauseThoughItEndsFirst) {
  EXPECT_EQ(code_of_job(kExitCommunication, kKilled, false), kKilled);
  EXPECT_EQ(code_of_job(kExitCommunication, kExitDisk, false), kExitDisk);
  EXPECT_EQ(code_of_job(kExitCommunication, kExitCommunication, false),
            kExitCommunication);
}

TEST(Spawn, WhoIsKilledForNotEndingIsNoCause) {
  EXPECT_EQ(code_of_job(kExitCommunication, kKilled, true), kExitCommunication);
  EXPECT_EQ(code_of_job(0, kKilled, true), kKilled);
}

}  // namespace
}  // namespace tapeline
