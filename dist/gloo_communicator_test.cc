#include "dist/gloo_communicator.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "dist/launch.h"
#include "dist/tcp_store.h"
#include "gtest/gtest.h"
#include "runtime/device.h"

namespace tapeline {
namespace {

constexpr absl::Duration kLong = absl::Seconds(30);

int free_port() { return TcpStoreServer::start(0).value()->port(); }

Launched rank_of(int rank, int world, int port) {
  return {.rank = rank, .world = world, .store_port = port};
}

// Two ranks as threads of this process.
void with_two(void (*rank)(GlooCommunicator&),
              const std::string& master = "127.0.0.1") {
  const int port = free_port();
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([=] {
      Launched launched = rank_of(r, 2, port);
      launched.master = master;
      const auto made = GlooCommunicator::connect(launched);
      ASSERT_TRUE(made.ok()) << made.status();
      rank(**made);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Gloo, RanksMeetAtLocalhost) {
  with_two([](GlooCommunicator& self) { EXPECT_EQ(self.size(), 2); },
           "localhost");
}

TEST(Gloo, MoreThan64PartsArrive) {
  with_two([](GlooCommunicator& self) {
    constexpr int kParts = 130;
    std::vector<TensorSpec> specs(kParts, {DType::kF32, {1}});
    const int other = 1 - self.rank();
    std::vector<Tensor> parts;
    for (int i = 0; i < kParts; ++i) {
      parts.push_back(i % 3 == 0 ? Tensor()
                                 : Tensor::full({1}, DType::kF32, i));
    }
    const auto sent = self.send({other, 0, 0}, specs, parts);
    const auto asked = self.receive({other, 0, 0}, 0, specs);
    ASSERT_TRUE(sent.ok() && asked.ok());
    const auto got = self.wait(*asked, kLong);
    ASSERT_TRUE(got.ok()) << got.status();
    for (int i = 0; i < kParts; ++i) {
      ASSERT_EQ(static_cast<bool>((*got)[i]), i % 3 != 0) << i;
      if (i % 3 == 0) continue;
      EXPECT_EQ((*got)[i].to_vector<float>()[0], static_cast<float>(i));
    }
    EXPECT_TRUE(self.wait(*sent, kLong).ok());
    EXPECT_TRUE(self.barrier(kLong).ok());
  });
}

TEST(Gloo, AWaitAfterAnAbortReturnsItsError) {
  with_two([](GlooCommunicator& self) {
    const auto asked =
        self.receive({1 - self.rank(), 0, 0}, 0, {{DType::kF32, {1}}});
    ASSERT_TRUE(asked.ok());
    EXPECT_TRUE(self.barrier(kLong).ok());
    self.abort(absl::DataLossError("why"));
    const absl::Status status = self.wait(*asked, kLong).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_TRUE(self.done(*asked));
  });
}

// Rank 1 stops when the others can find it, and is not connected yet or just
// so; who waits for whom depends on the order of addresses, so a few times.
TEST(Gloo, APeerThatStopsBeforeItIsConnectedIsGivenUpInTime) {
  for (int i = 0; i < 6; ++i) {
    const int port = free_port();
    const pid_t stopped = fork();
    ASSERT_GE(stopped, 0);
    if (stopped == 0) {
      (void)GlooCommunicator::connect(rank_of(1, 3, port));
      pause();
    }
    const auto join = [=](int rank) {
      return GlooCommunicator::connect(rank_of(rank, 3, port),
                                       {.connect_timeout = absl::Seconds(2)});
    };
    absl::StatusOr<std::unique_ptr<GlooCommunicator>> first, last;
    const absl::Time begin = absl::Now();
    std::thread one([&] { first = join(0); });
    const auto store = TcpStore::connect("127.0.0.1", port, kLong);
    std::thread two([&] { last = join(2); });
    // Its address is there.
    while (store.ok()) {
      const auto at = (*store)->peek("1", kLong);
      if (!at.ok() || *at) break;
    }
    kill(stopped, SIGSTOP);
    one.join();
    two.join();
    EXPECT_TRUE(store.ok());
    EXPECT_LT(absl::Now() - begin, absl::Seconds(2 + 5));
    kill(stopped, SIGKILL);
    waitpid(stopped, nullptr, 0);
  }
}

}  // namespace
}  // namespace tapeline
