#include "runtime/pool.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/dtype.h"
#include "runtime/fake_stream.h"

namespace tapeline {
namespace {

constexpr int kActivation = static_cast<int>(Tag::kActivation);
constexpr int kParameter = static_cast<int>(Tag::kParameter);

class PoolTest : public testing::Test {
 protected:
  Block get(size_t bytes, Tag tag = Tag::kActivation) {
    return pool_.allocate(bytes, tag, &stream_);
  }
  void put(const Block& block) { pool_.free(block, {stream_.record()}); }
  FakeStream stream_{"s"}, other_{"other"};
  Pool pool_;
};

TEST(SizeClass, LosesAtMostAQuarter) {
  EXPECT_EQ(size_class(0), 64u);
  EXPECT_EQ(size_class(1), 64u);
  EXPECT_EQ(size_class(64), 64u);
  EXPECT_EQ(size_class(65), 128u);
  EXPECT_EQ(size_class(4096), 4096u);
  EXPECT_EQ(size_class(4097), 5120u);
  EXPECT_EQ(size_class(8192), 8192u);
  EXPECT_EQ(size_class(8193), 10240u);
  size_t last = 0;
  for (size_t n = 1; n < 200'000; n += n < 5000 ? 1 : 97) {
    const size_t size = size_class(n);
    ASSERT_GE(size, n);
    ASSERT_GE(size, last) << n;
    ASSERT_EQ(size % 64, 0u);
    ASSERT_EQ(size_class(size), size);
    if (n > 256) {
      ASSERT_LE(size - n, n / 4 + 1) << n;
    }
    last = size;
  }
}

TEST_F(PoolTest, BlocksAreAlignedApartAndReused) {
  const Block a = get(100), b = get(100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data) % 64, 0u);
  EXPECT_EQ(a.bytes, 128u);
  EXPECT_GE(std::abs(a.data - b.data), 128);
  put(a);
  const Block c = get(120);
  EXPECT_EQ(c.data, a.data);
  EXPECT_EQ(pool_.stats().system_allocations, 2);
  put(b);
  put(c);
  // Another class gets other memory.
  const Block d = get(1000);
  EXPECT_EQ(pool_.stats().system_allocations, 3);
  put(d);
}

TEST_F(PoolTest, ASteadyStepAllocatesNothing) {
  for (int step = 0; step < 5; ++step) {
    std::vector<Block> blocks;
    for (size_t bytes : {10u, 5000u, 300u, 70'000u, 5000u}) {
      blocks.push_back(get(bytes));
    }
    for (const Block& block : blocks) put(block);
    EXPECT_EQ(pool_.stats().system_allocations, 5) << step;
  }
}

TEST_F(PoolTest, AccountsByTagWithPeaks) {
  const Block a = get(64, Tag::kParameter);
  const Block b = get(128), c = get(192);
  PoolStats stats = pool_.stats();
  EXPECT_EQ(stats.live_bytes[kParameter], 64);
  EXPECT_EQ(stats.live_bytes[kActivation], 320);
  EXPECT_EQ(stats.live, 384);
  put(b);
  put(c);
  stats = pool_.stats();
  EXPECT_EQ(stats.live_bytes[kActivation], 0);
  EXPECT_EQ(stats.peak_bytes[kActivation], 320);
  EXPECT_EQ(stats.live, 64);
  EXPECT_EQ(stats.peak, 384);
  EXPECT_EQ(stats.reserved, 384);
  pool_.reset_peak();
  stats = pool_.stats();
  EXPECT_EQ(stats.peak_bytes[kActivation], 0);
  EXPECT_EQ(stats.peak, 64);
  put(a);
}

TEST_F(PoolTest, ABlockInUseIsReusedAfterItsUse) {
  const Block a = get(64);
  std::byte scratch[64];
  stream_.copy(scratch, a.data, 64);  // still queued
  put(a);
  const Block b = pool_.allocate(64, Tag::kOther, &other_);
  EXPECT_EQ(b.data, a.data);
  EXPECT_EQ(other_.pending(), 1) << "its stream waits for the copy";
  EXPECT_EQ(other_.advance(), 0);
  stream_.advance(10);
  EXPECT_EQ(other_.advance(), 1);
  pool_.free(b, {});
}

TEST_F(PoolTest, IdleBlocksComeFirst) {
  const Block a = get(64), b = get(64);
  std::byte scratch[64];
  pool_.free(b, {});
  stream_.copy(scratch, a.data, 64);
  put(a);  // the newest
  const Block c = pool_.allocate(64, Tag::kOther, &other_);
  EXPECT_EQ(c.data, b.data);
  EXPECT_EQ(other_.pending(), 0);
  const Block d = get(64);  // on the stream that uses it no wait is needed
  EXPECT_EQ(d.data, a.data);
  EXPECT_EQ(stream_.pending(), 1);
  stream_.advance(10);
  pool_.free(c, {});
  pool_.free(d, {});
}

// A looser fit would use large blocks for small requests, which is what a step
// that recomputes something saves.
TEST_F(PoolTest, ABlockServesItsOwnClassAlone) {
  put(get(1024));
  const Block a = get(1000);
  EXPECT_EQ(pool_.stats().system_allocations, 1);
  EXPECT_EQ(pool_.stats().live, 1024) << "the class counts";
  put(a);
  put(get(960));
  EXPECT_EQ(pool_.stats().system_allocations, 2);
  put(get(1024));
  EXPECT_EQ(pool_.stats().system_allocations, 2) << "it kept its size";
}

TEST_F(PoolTest, OnceSettledAnyLargerBlockServes) {
  put(get(64 << 10));
  put(get(4096));
  const Block grown = get(8192);
  EXPECT_EQ(pool_.stats().system_allocations, 3) << "neither is of its class";
  put(grown);
  pool_.settle();
  const Block small = get(3000), next = get(3000);
  EXPECT_EQ(small.memory->capacity, 4096u) << "the closest first";
  EXPECT_EQ(next.memory->capacity, 8192u);
  const Block large = get(3000);
  EXPECT_EQ(large.memory->capacity, 65536u);
  EXPECT_EQ(pool_.stats().system_allocations, 3);
  EXPECT_EQ(pool_.stats().live, 3 * size_class(3000));
  const Block more = get(3000);
  EXPECT_EQ(pool_.stats().system_allocations, 4) << "there is none";
  for (const Block& block : {small, next, large, more}) put(block);
}

TEST(DryPool, CountsMemoryItDoesNotHave) {
  Pool pool(MemoryKind::kDevice, /*dry=*/true);
  CpuStream stream("cpu");
  const Block huge = pool.allocate(size_t{1} << 45, Tag::kActivation, &stream);
  const Block other = pool.allocate(64, Tag::kActivation, &stream);
  EXPECT_GE(std::abs(huge.data - other.data), 64);
  EXPECT_EQ(pool.stats().live, (int64_t{1} << 45) + 64);
  pool.set_poison(true);
  pool.free(huge, {});
  pool.free(other, {});
  EXPECT_EQ(pool.stats().live, 0);
}

TEST_F(PoolTest, TheHookSeesEveryEvent) {
  std::vector<std::string> seen;
  pool_.set_hook([&](MemoryEvent event, const Block& block) {
    seen.push_back(std::string(name_of(event)) + " " +
                   std::to_string(block.bytes) + " " +
                   std::string(name_of(block.tag)));
  });
  put(get(100));
  pool_.note(MemoryEvent::kReplay, {});
  pool_.set_hook(nullptr);
  put(get(100));
  EXPECT_EQ(seen, (std::vector<std::string>{"allocate 128 activation",
                                            "free 128 activation",
                                            "replay 0 other"}));
}

TEST_F(PoolTest, TheHookIsToldWhatReturnsToTheSystem) {
  put(get(1024));
  put(get(1000));  // of the same memory
  std::vector<size_t> gone;
  pool_.set_hook([&](MemoryEvent event, const Block& block) {
    if (event == MemoryEvent::kGone) gone.push_back(block.bytes);
  });
  pool_.trim();
  EXPECT_EQ(gone, std::vector<size_t>{1024});
  pool_.set_hook(nullptr);
}

TEST_F(PoolTest, PoisonIsNaNWhenHandedOutAndWhenReturned) {
  pool_.set_poison(true);
  const Block a = get(64);
  auto* floats = reinterpret_cast<float*>(a.data);
  EXPECT_TRUE(std::isnan(floats[0]));
  EXPECT_TRUE(std::isnan(floats[15]));
  EXPECT_TRUE(std::isnan(reinterpret_cast<double*>(a.data)[7]));
  EXPECT_TRUE(std::isnan(
      static_cast<float>(reinterpret_cast<const bf16*>(a.data)[31])));
  EXPECT_GT(reinterpret_cast<int32_t*>(a.data)[3], 1 << 30);
  for (int i = 0; i < 16; ++i) floats[i] = 1.0f;
  put(a);
  EXPECT_TRUE(std::isnan(floats[0]));
  EXPECT_TRUE(std::isnan(floats[15]));
}

TEST_F(PoolTest, PoisonDoesNotRunAheadOfQueuedWork) {
  pool_.set_poison(true);
  const Block a = get(64);
  std::memset(a.data, 7, 64);
  std::byte seen[64];
  stream_.copy(seen, a.data, 64);
  put(a);
  const Block b = get(64);
  ASSERT_EQ(b.data, a.data);
  stream_.advance(10);
  EXPECT_EQ(seen[0], std::byte{7});
  EXPECT_EQ(seen[63], std::byte{7});
  put(b);
}

TEST_F(PoolTest, TrimReturnsFreeBlocks) {
  const Block a = get(64), b = get(64);
  put(a);
  EXPECT_EQ(pool_.stats().reserved, 128);
  pool_.trim();
  EXPECT_EQ(pool_.stats().reserved, 64);
  put(b);
}

TEST_F(PoolTest, TheCapIsMetByGivingUpFreeBlocks) {
  pool_.set_cap(1024);
  put(get(512));
  put(get(256));
  const Block a = get(1024);
  EXPECT_EQ(pool_.stats().reserved, 1024);
  put(a);
}

TEST_F(PoolTest, TheCapIsMetByWaitingForFreeBlocks) {
  pool_.set_cap(1024);
  const Block a = get(512), b = get(256);
  std::byte scratch[64];
  stream_.copy(scratch, a.data, 64);
  put(a);
  put(b);
  const Block c = get(1024);
  EXPECT_EQ(stream_.pending(), 0);
  EXPECT_EQ(pool_.stats().reserved, 1024);
  put(c);
}

TEST_F(PoolTest, ThreadsMayShareIt) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      CpuStream stream("cpu");
      for (int i = 0; i < 500; ++i) {
        const Block block =
            pool_.allocate(64 * (1 + i % 3), Tag::kOther, &stream);
        std::memset(block.data, t, block.bytes);
        for (size_t k = 0; k < block.bytes; ++k) {
          ASSERT_EQ(block.data[k], static_cast<std::byte>(t));
        }
        pool_.free(block, {stream.record()});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool_.stats().live, 0);
  EXPECT_LE(pool_.stats().system_allocations, 12);
}

class PinnedPoolTest : public testing::Test {
 protected:
  Block get(size_t bytes) { return pool_.allocate(bytes, Tag::kOther, &out_); }

  FakeStream out_{"out"}, in_{"in"};
  Pool pool_{MemoryKind::kPinned};
};

TEST_F(PinnedPoolTest, TheSmallestBlockThatFitsIsReused) {
  const Block small = get(5000), large = get(20'000);
  EXPECT_EQ(small.bytes, 8192u) << "whole pages";
  EXPECT_EQ(reinterpret_cast<uintptr_t>(small.data) % 4096, 0u);
  std::memset(large.data, 1, large.bytes);
  pool_.free(large, {});
  pool_.free(small, {});
  EXPECT_FALSE(small.owned());
  const Block again = get(6000);
  EXPECT_EQ(again.data, small.data);
  EXPECT_FALSE(small.owned());
  EXPECT_TRUE(again.owned());
  const Block page = get(100);
  EXPECT_EQ(page.data, large.data) << "five times as large";
  EXPECT_EQ(pool_.stats().system_allocations, 2);
  EXPECT_EQ(pool_.stats().live, 8192 + 4096);
  pool_.free(again, {});
  pool_.free(page, {});
}

// What a block is reused for, and what grows, must not depend on speed.
TEST_F(PinnedPoolTest, AUsedBlockThatFitsComesBeforeALargerIdleOne) {
  const Block small = get(4096), large = get(8192);
  std::byte to[16];
  in_.copy(to, small.data, 16);
  pool_.free(small, {in_.record()});
  pool_.free(large, {});
  const Block again = get(4096);
  EXPECT_EQ(again.data, small.data);
  EXPECT_EQ(out_.pending(), 1) << "the copy out waits for the load";
  EXPECT_EQ(out_.advance(), 0);
  in_.advance(10);
  EXPECT_EQ(out_.advance(), 1);
  pool_.free(again, {});
}

TEST_F(PinnedPoolTest, LengthsThatVaryCostTheLongest) {
  for (size_t bytes : {4096u, 40'960u, 8192u, 12'288u, 40'960u, 20'480u}) {
    pool_.free(get(bytes), {});
    EXPECT_LE(pool_.stats().reserved, 40'960);
  }
  EXPECT_EQ(pool_.stats().system_allocations, 2) << "grown once";
  EXPECT_EQ(pool_.stats().peak_reserved, 40'960);
}

TEST_F(PinnedPoolTest, TheCapRefuses) {
  pool_.set_cap(8192);
  const Block block = get(8192);
  EXPECT_EQ(get(1).data, nullptr);
  EXPECT_EQ(pool_.stats().refusals, 1);
  EXPECT_EQ(pool_.stats().live, 8192);
  pool_.free(block, {});
  const Block other = get(100);
  EXPECT_NE(other.data, nullptr);
  pool_.free(other, {});
  pool_.set_cap(12'288);
  const Block larger = get(12'000);
  ASSERT_NE(larger.data, nullptr) << "free blocks give way";
  EXPECT_EQ(pool_.stats().reserved, 12'288);
  pool_.free(larger, {});
}

TEST_F(PinnedPoolTest, ABlockIsGivenUpAfterItsLastUse) {
  const Block block = get(4096);
  std::byte to[16];
  in_.copy(to, block.data, 16);
  pool_.free(block, {in_.record()});
  const Block larger = get(8192);
  EXPECT_EQ(in_.pending(), 0) << "the copy still reads it";
  EXPECT_EQ(pool_.stats().reserved, 8192);
  pool_.free(larger, {});
}

using PoolDeathTest = PoolTest;

TEST_F(PoolDeathTest, TheCapSaysWhoHoldsWhat) {
  pool_.set_cap(1024);
  const Block a = get(512, Tag::kParameter);
  EXPECT_DEATH(get(1000),
               "out of memory: 1000 bytes for activation\n"
               "  parameter: live 512 peak 512 bytes\n");
  put(a);
}

TEST_F(PoolDeathTest, ABlockIsGivenBackOnce) {
  const Block block = get(1);
  put(block);
  EXPECT_DEATH(put(block), "given back twice");
  const Block next = get(1);
  ASSERT_EQ(next.data, block.data);
  EXPECT_DEATH(put(block), "given back twice") << "it has another owner";
  put(next);
}

}  // namespace
}  // namespace tapeline
