#include "dist/tcp_store.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

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

int raw_client(int port) {
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  at.sin_port = htons(static_cast<uint16_t>(port));
  const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(connect(s, reinterpret_cast<sockaddr*>(&at), sizeof(at)), 0);
  return s;
}

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

// Hosts without a file of hosts know it too.
TEST(Store, LocalhostIsTheLoopbackInterface) {
  EXPECT_EQ(node_of("localhost"), nullptr);
  EXPECT_STREQ(node_of("gpu-7"), "gpu-7");
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

TEST(Store, IsReachedOverIPv6) {
  if (const int s = socket(AF_INET6, SOCK_STREAM, 0); s >= 0) {
    close(s);
  } else {
    GTEST_SKIP() << "this host has no IPv6";
  }
  const auto server = TcpStoreServer::start(0).value();
  const auto a = TcpStore::connect("::1", server->port(), kLong).value();
  EXPECT_TRUE(a->set("x", "1", kLong).ok());
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

TEST(Store, WhoSendsHalfARequestHoldsUpNobody) {
  const auto server = TcpStoreServer::start(0).value();
  std::vector<int> strangers;
  for (int i = 0; i < 4; ++i) {
    strangers.push_back(raw_client(server->port()));
    ASSERT_EQ(send(strangers.back(), "G\x05\0\0\0ab", 7, 0), 7);
  }
  const absl::Time begin = absl::Now();
  const auto a = TcpStore::connect("127.0.0.1", server->port(), kLong).value();
  ASSERT_TRUE(a->set("abcde", "1", kLong).ok());
  EXPECT_EQ(a->get("abcde", kLong).value(), "1");
  EXPECT_LT(absl::Now() - begin, absl::Seconds(4));
  // The rest of the request is its end.
  ASSERT_EQ(send(strangers[0], "cde\0\0\0\0", 7, 0), 7);
  char answer[6] = {};
  ASSERT_EQ(recv(strangers[0], answer, 6, MSG_WAITALL), 6);
  EXPECT_EQ(std::string(answer + 4, 2), "+1");
  for (const int stranger : strangers) close(stranger);
}

TEST(Store, OneSetsAKeyFirst) {
  const auto server = TcpStoreServer::start(0).value();
  const auto a = TcpStore::connect("127.0.0.1", server->port(), kLong).value();
  EXPECT_TRUE(a->set_new("x", "1", kLong).value());
  EXPECT_FALSE(a->set_new("x", "2", kLong).value());
  EXPECT_EQ(a->get("x", kLong).value(), "1");
}

TEST(Store, ARequestAfterOneThatFailedConnectsAgain) {
  auto server = TcpStoreServer::start(0).value();
  const int port = server->port();
  const auto a = TcpStore::connect("127.0.0.1", port, kLong).value();
  server.reset();
  EXPECT_FALSE(a->set("x", "1", kLong).ok());
  server = TcpStoreServer::start(port).value();
  EXPECT_TRUE(a->set("x", "2", kLong).ok());
  EXPECT_EQ(a->get("x", kLong).value(), "2");
}

TEST(Store, AHostThatDoesNotAnswerIsGivenUpInTime) {
  // A full queue of connections: more are not answered.
  sockaddr_in at = {};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int mute = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t size = sizeof(at);
  ASSERT_EQ(bind(mute, reinterpret_cast<sockaddr*>(&at), size), 0);
  ASSERT_EQ(listen(mute, 0), 0);
  getsockname(mute, reinterpret_cast<sockaddr*>(&at), &size);
  std::vector<int> queue;
  for (int i = 0; i < 4; ++i) {
    queue.push_back(
        socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    (void)connect(queue.back(), reinterpret_cast<sockaddr*>(&at), size);
  }
  const absl::Time begin = absl::Now();
  const auto none = TcpStore::connect("127.0.0.1", ntohs(at.sin_port),
                                      absl::Milliseconds(300));
  EXPECT_FALSE(none.ok());
  EXPECT_LT(absl::Now() - begin, absl::Seconds(5));
  for (const int one : queue) close(one);
  close(mute);
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
