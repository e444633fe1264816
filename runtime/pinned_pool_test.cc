#include "runtime/pinned_pool.h"

#include <cstring>

#include "gtest/gtest.h"
#include "runtime/fake_stream.h"

namespace tapeline {
namespace {

TEST(PinnedPool, ReusesTheSmallestSlotThatFits) {
  PinnedPool pool;
  PinnedSlot* small = pool.lease(5000);
  PinnedSlot* large = pool.lease(20'000);
  EXPECT_EQ(small->bytes, 8192u) << "whole pages";
  std::memset(large->data, 1, large->bytes);
  const uint64_t generation = small->generation;
  pool.give_back(large, 20'000, {});
  pool.give_back(small, 5000, {});
  PinnedSlot* again = pool.lease(6000);
  EXPECT_EQ(again, small);
  EXPECT_GT(again->generation, generation);
  EXPECT_EQ(pool.stats().system_allocations, 2);
  EXPECT_EQ(pool.stats().requested_bytes, 6000);
  EXPECT_EQ(pool.stats().leased_bytes, 8192);
  pool.give_back(again, 6000, {});
}

TEST(PinnedPool, LengthsThatVaryCostTheLongest) {
  PinnedPool pool;
  for (size_t bytes : {4096u, 40'960u, 8192u, 12'288u, 40'960u, 20'480u}) {
    pool.give_back(pool.lease(bytes), bytes, {});
    EXPECT_LE(pool.stats().bytes, 40'960);
  }
  EXPECT_EQ(pool.stats().system_allocations, 2) << "grown once";
}

TEST(PinnedPool, TheCapRefuses) {
  PinnedPool pool;
  pool.set_cap(8192);
  PinnedSlot* slot = pool.lease(8192);
  EXPECT_EQ(pool.lease(1), nullptr);
  EXPECT_EQ(pool.stats().refusals, 1);
  pool.give_back(slot, 8192, {});
  PinnedSlot* other = pool.lease(100);
  EXPECT_NE(other, nullptr);
  pool.give_back(other, 100, {});
  pool.set_cap(12'288);
  PinnedSlot* larger = pool.lease(12'000);
  ASSERT_NE(larger, nullptr) << "free slots give way";
  EXPECT_EQ(pool.stats().bytes, 12'288);
  pool.give_back(larger, 12'000, {});
}

TEST(PinnedPool, ASlotIsGivenUpAfterItsLastUse) {
  PinnedPool pool;
  FakeStream in("in");
  PinnedSlot* slot = pool.lease(4096);
  std::byte to[16];
  in.copy(to, slot->data, 16);
  pool.give_back(slot, 4096, in.record());
  PinnedSlot* larger = pool.lease(8192);
  EXPECT_EQ(in.pending(), 0) << "the copy still reads the slot";
  EXPECT_EQ(pool.stats().bytes, 8192);
  pool.give_back(larger, 8192, {});
}

TEST(PinnedPoolDeathTest, GivenBackOnce) {
  PinnedPool pool;
  PinnedSlot* slot = pool.lease(1);
  pool.give_back(slot, 1, {});
  EXPECT_DEATH(pool.give_back(slot, 1, {}), "given back twice");
}

}  // namespace
}  // namespace tapeline
