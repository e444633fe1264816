#include "dist/message_gates.h"

#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(10);

struct Pair {
  std::unique_ptr<TcpStoreServer> server;
  std::unique_ptr<MessageGates> ranks[2];
};

Pair make_pair(bool first_shares, bool second_shares) {
  Pair out;
  out.server = TcpStoreServer::start(0).value();
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      Launched launch;
      launch.rank = r;
      launch.world = 2;
      launch.store_port = out.server->port();
      out.ranks[r] = MessageGates::make(3, launch, kTimeout,
                                        r == 0 ? first_shares : second_shares)
                         .value();
    });
  }
  for (std::thread& t : threads) t.join();
  return out;
}

class GatesOfAKind : public testing::TestWithParam<bool> {};

TEST_P(GatesOfAKind, AnEndIsThereWhenItSaidSo) {
  const Pair pair = make_pair(GetParam(), GetParam());
  MessageGates &a = *pair.ranks[0], &b = *pair.ranks[1];
  EXPECT_EQ(a.shared(), GetParam());
  for (uint32_t n = 1; n <= 3; ++n) {
    EXPECT_FALSE(b.came(1, true, n).value());
    ASSERT_TRUE(a.come(1, true, n).ok());
    EXPECT_TRUE(b.came(1, true, n).value());
    EXPECT_FALSE(b.came(1, true, n + 1).value());
  }
  // Neither the other end nor another route has come by that.
  EXPECT_FALSE(b.came(1, false, 1).value());
  EXPECT_FALSE(b.came(0, true, 1).value());
  EXPECT_FALSE(b.came(2, true, 1).value());
  ASSERT_TRUE(b.come(1, false, 2).ok());
  EXPECT_TRUE(a.came(1, false, 1).value());
}

INSTANTIATE_TEST_SUITE_P(, GatesOfAKind, testing::Bool(), [](const auto& info) {
  return info.param ? "Shared" : "OverTheStore";
});

// A rank that cannot share memory takes the others with it.
TEST(Gates, AreOfOneKindOnAllRanks) {
  for (const bool first : {false, true}) {
    const Pair pair = make_pair(first, !first);
    EXPECT_FALSE(pair.ranks[0]->shared());
    EXPECT_FALSE(pair.ranks[1]->shared());
    ASSERT_TRUE(pair.ranks[0]->come(2, true, 1).ok());
    EXPECT_TRUE(pair.ranks[1]->came(2, true, 1).value());
  }
}

}  // namespace
}  // namespace tapeline
