#include "dist/compare_settings.h"

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "dist/launch.h"
#include "dist/tcp_store.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

using Settings = std::vector<Setting>;

// Ranks as threads, the last one `late`; a change to one's launch and settings.
std::vector<absl::Status> meet(
    int ranks, absl::Duration timeout,
    const std::function<void(int, Launched&, Settings&)>& change,
    absl::Duration late = absl::ZeroDuration()) {
  const int port = TcpStoreServer::start(0).value()->port();
  std::vector<absl::Status> out(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    Launched launch{.rank = r, .world = ranks, .store_port = port};
    Settings settings = {{"seed", "1"}, {"optimizer.lr", "0.01"}};
    change(r, launch, settings);
    threads.emplace_back([=, &out] {
      if (r == ranks - 1) absl::SleepFor(late);
      out[r] = compare_settings(launch, settings, absl::Now() + timeout);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return out;
}

void expect_all(const std::vector<absl::Status>& got, absl::StatusCode code,
                const std::string& text) {
  for (const absl::Status& status : got) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), text)) << status;
  }
}

TEST(CompareSettings, EqualOnesPassAndLeaveThePort) {
  int port = 0;
  const auto got =
      meet(5, absl::Seconds(20),
           [&](int, Launched& launch, Settings&) { port = launch.store_port; });
  for (const absl::Status& status : got) EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(TcpStoreServer::start(port).ok());
}

TEST(CompareSettings, TheRankAndTheKeyAreNamedOnAllRanks) {
  expect_all(meet(3, absl::Seconds(20),
                  [](int rank, Launched&, Settings& settings) {
                    if (rank == 2) settings[1].value = "0.1";
                  }),
             absl::StatusCode::kInvalidArgument,
             "rank 2 differs from rank 0: on it optimizer.lr is '0.1', on rank "
             "0 '0.01'");
  expect_all(meet(2, absl::Seconds(20),
                  [](int rank, Launched&, Settings& settings) {
                    if (rank == 1) settings.push_back({"model.a\n", "b"});
                  }),
             absl::StatusCode::kInvalidArgument, "there is model.a");
}

TEST(CompareSettings, AnotherNumberOfProcessesAndAnotherJobAreNamed) {
  expect_all(meet(2, absl::Seconds(20),
                  [](int rank, Launched& launch, Settings&) {
                    if (rank == 1) launch.world = 3;
                  }),
             absl::StatusCode::kInvalidArgument,
             "the number of processes is '3', on rank 0 '2'");
  expect_all(meet(2, absl::Seconds(20),
                  [](int rank, Launched& launch, Settings&) {
                    launch.job = rank == 0 ? "17" : "18";
                  }),
             absl::StatusCode::kInvalidArgument,
             "the job is '18', on rank 0 '17'");
}

TEST(CompareSettings, ARankThatIsThereTwiceEndsAlone) {
  // Of two jobs on one port: the ranks that came first go on.
  const auto got = meet(
      4, absl::Seconds(20),
      [](int rank, Launched& launch, Settings&) {
        launch.world = 3;
        if (rank >= 2) launch.rank = rank - 1;
      },
      absl::Seconds(1));
  EXPECT_TRUE(got[3].ok()) << got[3];
  EXPECT_TRUE(got[0].ok()) << got[0];
  EXPECT_NE(got[1].ok(), got[2].ok());
  const absl::Status& twice = got[1].ok() ? got[2] : got[1];
  EXPECT_TRUE(absl::StrContains(twice.message(), "rank 1 is there twice"))
      << twice;
}

TEST(CompareSettings, ARankThatIsNotThereIsNamedInTime) {
  const absl::Time begin = absl::Now();
  std::vector<absl::Status> got =
      meet(3, absl::Seconds(1), [](int rank, Launched& launch, Settings&) {
        launch.world = 4;
        if (rank == 2) launch.rank = 3;
      });
  EXPECT_LT(absl::Now() - begin, absl::Seconds(1 + 10));
  expect_all(got, absl::StatusCode::kUnavailable,
             "connect to all 4 ranks: rank 2 was not there after 1s");
}

std::atomic<bool> stopped = false;

TEST(CompareSettings, AStopEndsTheWait) {
  const int port = TcpStoreServer::start(0).value()->port();
  const Launched launch{.rank = 0, .world = 2, .store_port = port};
  std::thread later([] {
    absl::SleepFor(absl::Milliseconds(100));
    stopped = true;
  });
  const absl::Time begin = absl::Now();
  const absl::Status status = compare_settings(
      launch, {}, begin + absl::Seconds(60), [] { return stopped.load(); });
  later.join();
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
}

}  // namespace
}  // namespace tapeline
