#include "dist/tcp_store.h"

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

constexpr absl::Duration kLong = absl::Seconds(20);

TEST(Store, ValuesAreThoseThatWereSet) {
  const auto server = TcpStoreServer::start(0).value();
  const auto a = TcpStore::connect("127.0.0.1", server->port(), kLong).value();
  const auto b = TcpStore::connect("localhost", server->port(), kLong).value();
  EXPECT_FALSE(a->peek("x", kLong).value().has_value());
  const std::string bytes("a\0b\n+-", 6);
  ASSERT_TRUE(a->set("x", bytes, kLong).ok());
  ASSERT_TRUE(a->set("empty", "", kLong).ok());
  EXPECT_EQ(b->get("x", kLong).value(), bytes);
  EXPECT_EQ(b->peek("empty", kLong).value(), "");
  ASSERT_TRUE(b->set("x", "other", kLong).ok());
  EXPECT_EQ(a->get("x", kLong).value(), "other");
}

TEST(Store, GetWaitsUntilSomebodySets) {
  const auto server = TcpStoreServer::start(0).value();
  const auto a = TcpStore::connect("127.0.0.1", server->port(), kLong).value();
  std::atomic<bool> set = false;
  std::thread other([&] {
    const auto b =
        TcpStore::connect("127.0.0.1", server->port(), kLong).value();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    set = true;
    EXPECT_TRUE(b->set("late", "1", kLong).ok());
  });
  EXPECT_EQ(a->get("late", kLong).value(), "1");
  EXPECT_TRUE(set);
  other.join();
}

TEST(Store, ManyClientsAtOnce) {
  const auto server = TcpStoreServer::start(0).value();
  std::vector<std::thread> threads;
  for (int r = 0; r < 8; ++r) {
    threads.emplace_back([&, r] {
      const auto store =
          TcpStore::connect("127.0.0.1", server->port(), kLong).value();
      ASSERT_TRUE(
          store->set(absl::StrCat("k", r), absl::StrCat(r), kLong).ok());
      for (int other = 0; other < 8; ++other) {
        EXPECT_EQ(store->get(absl::StrCat("k", other), kLong).value(),
                  absl::StrCat(other));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Store, AMissingKeyAndAMissingServerAreErrorsInTime) {
  int port = 0;
  {
    const auto server = TcpStoreServer::start(0).value();
    port = server->port();
    const auto a = TcpStore::connect("127.0.0.1", port, kLong).value();
    const absl::Status none = a->get("y", absl::Milliseconds(50)).status();
    EXPECT_TRUE(absl::IsDeadlineExceeded(none));
    EXPECT_TRUE(absl::StrContains(
        none.message(), absl::StrCat("127.0.0.1:", port, " has no 'y'")))
        << none;
  }
  const absl::Time begin = absl::Now();
  const auto gone =
      TcpStore::connect("127.0.0.1", port, absl::Milliseconds(100));
  EXPECT_TRUE(absl::StrContains(gone.status().message(), "is rank 0 running"))
      << gone.status();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
}

TEST(Store, AServerThatEndsBreaksItsClients) {
  auto server = TcpStoreServer::start(0).value();
  const auto a = TcpStore::connect("127.0.0.1", server->port(), kLong).value();
  ASSERT_TRUE(a->set("x", "1", kLong).ok());
  server.reset();
  EXPECT_FALSE(a->set("x", "2", kLong).ok());
  EXPECT_FALSE(a->peek("x", kLong).ok());
}

TEST(Store, APortInUseSaysSo) {
  const auto server = TcpStoreServer::start(0).value();
  const auto second = TcpStoreServer::start(server->port());
  ASSERT_FALSE(second.ok());
  EXPECT_TRUE(absl::StrContains(second.status().message(),
                                "choose another one with TAPELINE_STORE_PORT"))
      << second.status();
}

}  // namespace
}  // namespace tapeline
