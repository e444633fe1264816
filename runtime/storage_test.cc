#include "runtime/storage.h"

#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/access.h"
#include "runtime/edge.h"
#include "runtime/fake_stream.h"

namespace tapeline {
namespace {

// A device whose compute stream, and two copy streams, move only when told to.
class StorageTest : public testing::Test {
 protected:
  StorageTest()
      : send_("send"),
        device_(1, {std::make_unique<FakeStream>("compute"),
                    std::make_unique<FakeStream>("copy_out"),
                    std::make_unique<FakeStream>("copy_in")}),
        scope_(device_) {}

  ~StorageTest() override { compute().synchronize(compute().record()); }

  FakeStream& compute() { return static_cast<FakeStream&>(device_.compute()); }
  FakeStream& out() { return static_cast<FakeStream&>(device_.copy_out()); }
  FakeStream& in() { return static_cast<FakeStream&>(device_.copy_in()); }

  // Fills the bytes with i * step + 1 as a finished kernel would.
  void fill(Storage& storage, int step) {
    std::byte* bytes = storage.acquire(compute());
    for (size_t i = 0; i < kBytes; ++i) {
      bytes[i] = static_cast<std::byte>(static_cast<int>(i) * step + 1);
    }
    storage.release(compute(), true);
  }
  // The bytes once everything queued has run; counts as a use.
  std::vector<std::byte> contents(Storage& storage) {
    const std::byte* bytes = storage.acquire(compute());
    compute().synchronize(compute().record());
    std::vector<std::byte> copy(bytes, bytes + kBytes);
    storage.release(compute(), false);
    return copy;
  }
  static std::vector<std::byte> pattern(int step) {
    std::vector<std::byte> bytes(kBytes);
    for (size_t i = 0; i < kBytes; ++i) {
      bytes[i] = static_cast<std::byte>(static_cast<int>(i) * step + 1);
    }
    return bytes;
  }
  StoragePtr make() {
    return std::make_shared<Storage>(device_, kBytes, Tag::kActivation);
  }
  // Moves a filled storage to the host.
  void evict(Storage& storage) {
    ASSERT_TRUE(storage.copy_out());
    out().synchronize(out().record());
    ASSERT_TRUE(storage.evict());
  }

  static constexpr size_t kBytes = 100;
  // The streams that tensors were used on outlive the device.
  FakeStream send_;
  Device device_;
  DeviceScope scope_;
};

TEST_F(StorageTest, GoesOutAndComesBackWithItsBytesAndVersion) {
  const StoragePtr storage = make();
  storage->bump_version();
  fill(*storage, 3);
  const uint32_t version = storage->version();
  EXPECT_EQ(storage->residency(), Residency::kResident);

  ASSERT_TRUE(storage->copy_out());
  EXPECT_EQ(storage->residency(), Residency::kCopying);
  EXPECT_EQ(out().bytes_copied(), 0) << "the copy runs later";
  EXPECT_TRUE(storage->evict()) << "the block waits for the copy, not we";
  EXPECT_EQ(storage->residency(), Residency::kHost);
  EXPECT_EQ(device_.pool().stats().live, 0);

  storage->load();
  EXPECT_EQ(storage->residency(), Residency::kLoading);
  EXPECT_EQ(device_.pool().stats().live, 128);
  in().synchronize(in().record());
  EXPECT_EQ(out().bytes_copied(), kBytes) << "the load runs after the copy out";
  EXPECT_EQ(device_.pinned().stats().live, 0);
  EXPECT_EQ(contents(*storage), pattern(3));
  EXPECT_EQ(storage->residency(), Residency::kResident);
  EXPECT_EQ(storage->version(), version);
  EXPECT_EQ(storage->leases(), 0);
}

TEST_F(StorageTest, IsNotEvictedUnderALease) {
  const StoragePtr storage = make();
  fill(*storage, 5);
  ASSERT_TRUE(storage->copy_out());
  storage->acquire(compute());
  storage->acquire(compute());
  EXPECT_FALSE(storage->evict());
  storage->release(compute(), false);
  EXPECT_FALSE(storage->evict());
  storage->release(compute(), false);
  EXPECT_TRUE(storage->evict());
}

TEST_F(StorageTest, StaysReadableWhileItIsCopiedOut) {
  const StoragePtr storage = make();
  fill(*storage, 7);
  ASSERT_TRUE(storage->copy_out());
  EXPECT_EQ(contents(*storage), pattern(7));
  EXPECT_EQ(storage->residency(), Residency::kCopying);
}

TEST_F(StorageTest, TheCopyOutWaitsForTheWriter) {
  const StoragePtr storage = make();
  std::vector<std::byte> source = pattern(9);
  std::byte* bytes = storage->acquire(compute());
  compute().copy(bytes, source.data(), kBytes);  // a kernel not run yet
  storage->release(compute(), true);
  ASSERT_TRUE(storage->copy_out());
  EXPECT_EQ(out().advance(10), 0) << "the writer has not run";
  compute().advance(10);
  out().advance(10);
  EXPECT_TRUE(storage->evict());
  EXPECT_EQ(contents(*storage), pattern(9));
}

TEST_F(StorageTest, TheReaderWaitsForTheLoad) {
  const StoragePtr storage = make();
  fill(*storage, 3);
  evict(*storage);
  storage->load();
  std::vector<std::byte> seen(kBytes);
  const std::byte* bytes = storage->acquire(compute());
  compute().copy(seen.data(), bytes, kBytes);
  storage->release(compute(), false);
  EXPECT_EQ(storage->residency(), Residency::kLoading);
  EXPECT_EQ(compute().advance(10), 0) << "the load has not run";
  in().advance(10);
  compute().advance(10);
  EXPECT_EQ(seen, pattern(3));
}

TEST_F(StorageTest, TheLoadWaitsForTheBlocksLastUser) {
  StoragePtr storage = make();
  fill(*storage, 3);
  evict(*storage);
  // Another tensor's kernel still reads the block that the load will get.
  std::vector<std::byte> seen(kBytes);
  {
    const StoragePtr other = make();
    fill(*other, 11);
    const std::byte* bytes = other->acquire(compute());
    compute().copy(seen.data(), bytes, kBytes);
    other->release(compute(), false);
  }
  storage->load();
  EXPECT_EQ(device_.pool().stats().system_allocations, 1) << "same block";
  in().advance(10);
  compute().advance(10);
  EXPECT_EQ(seen, pattern(11));
  in().advance(10);
  EXPECT_EQ(contents(*storage), pattern(3));
}

TEST_F(StorageTest, UsingEvictedBytesReloadsAndCounts) {
  const StoragePtr storage = make();
  fill(*storage, 3);
  evict(*storage);
  const int64_t before = Storage::demand_reloads();
  EXPECT_EQ(contents(*storage), pattern(3));
  EXPECT_EQ(Storage::demand_reloads(), before + 1);
  EXPECT_EQ(contents(*storage), pattern(3));
  EXPECT_EQ(Storage::demand_reloads(), before + 1);
}

TEST_F(StorageTest, APlannedLoadIsNotCounted) {
  const StoragePtr storage = make();
  storage->set_strict(true);
  fill(*storage, 3);
  evict(*storage);
  const int64_t before = Storage::demand_reloads();
  storage->load();
  EXPECT_EQ(contents(*storage), pattern(3));
  EXPECT_EQ(Storage::demand_reloads(), before);
}

TEST_F(StorageTest, ACancelledCopyLeavesItResident) {
  const StoragePtr storage = make();
  fill(*storage, 3);
  ASSERT_TRUE(storage->copy_out());
  storage->load();
  EXPECT_EQ(storage->residency(), Residency::kResident);
  out().advance(10);
  EXPECT_EQ(contents(*storage), pattern(3));
}

TEST_F(StorageTest, AWriteCancelsTheCopyOut) {
  const StoragePtr storage = make();
  fill(*storage, 3);
  ASSERT_TRUE(storage->copy_out());
  out().advance(10);
  std::byte* bytes = storage->acquire(compute(), true);
  EXPECT_EQ(storage->residency(), Residency::kResident);
  EXPECT_EQ(device_.pinned().stats().live, 0);
  std::memcpy(bytes, pattern(13).data(), kBytes);
  storage->release(compute(), true);
  EXPECT_FALSE(storage->evict()) << "the host has the old bytes";
  EXPECT_EQ(contents(*storage), pattern(13));
}

TEST_F(StorageTest, AWriterWaitsForReadersOnOtherStreams) {
  const StoragePtr storage = make();
  fill(*storage, 3);
  std::vector<std::byte> seen(kBytes);
  const std::byte* bytes = storage->acquire(send_);
  send_.copy(seen.data(), bytes, kBytes);
  storage->release(send_, false);
  const std::vector<std::byte> next = pattern(13);
  std::byte* target = storage->acquire(compute(), true);
  compute().copy(target, next.data(), kBytes);
  storage->release(compute(), true);
  compute().advance(10);
  send_.advance(10);
  compute().advance(10);
  EXPECT_EQ(seen, pattern(3));
  EXPECT_EQ(contents(*storage), next);
}

TEST_F(StorageTest, ReadersOfTwoStreamsBothKeepTheBlock) {
  std::vector<std::byte> seen(kBytes);
  {
    const StoragePtr storage = make();
    fill(*storage, 3);
    send_.copy(seen.data(), storage->acquire(send_), kBytes);
    storage->release(send_, false);
    storage->acquire(compute());
    storage->release(compute(), false);  // the last use, but not the only one
  }
  const StoragePtr next = make();
  const std::vector<std::byte> other = pattern(13);
  compute().copy(next->acquire(compute(), true), other.data(), kBytes);
  next->release(compute(), true);
  compute().advance(10);
  send_.advance(10);
  EXPECT_EQ(seen, pattern(3)) << "the block was reused too early";
  compute().advance(10);
}

TEST_F(StorageTest, DyingWhileCopiedOutKeepsTheBlockForTheCopy) {
  {
    const StoragePtr storage = make();
    fill(*storage, 3);
    ASSERT_TRUE(storage->copy_out());
  }
  const StoragePtr next = make();
  const std::vector<std::byte> other = pattern(13);
  compute().copy(next->acquire(compute(), true), other.data(), kBytes);
  next->release(compute(), true);
  compute().advance(10);
  out().advance(10);
  compute().advance(10);
  EXPECT_EQ(contents(*next), other) << "the block was reused under the copy";
}

TEST_F(StorageTest, AnEvictedBlockIsReusedAfterItsCopy) {
  const StoragePtr storage = make();
  fill(*storage, 3);
  ASSERT_TRUE(storage->copy_out());
  ASSERT_TRUE(storage->evict());
  const StoragePtr next = make();
  EXPECT_EQ(device_.pool().stats().system_allocations, 1) << "the same block";
  const std::vector<std::byte> other = pattern(13);
  compute().copy(next->acquire(compute(), true), other.data(), kBytes);
  next->release(compute(), true);
  compute().advance(10);
  EXPECT_EQ(compute().pending(), 2) << "the copy out has not run";
  EXPECT_EQ(contents(*storage), pattern(3));
  EXPECT_EQ(contents(*next), other);
}

TEST_F(StorageTest, ASlotIsRewrittenAfterItsLoad) {
  StoragePtr a = make();
  fill(*a, 3);
  evict(*a);
  a->load();
  const StoragePtr b = make();
  fill(*b, 5);
  ASSERT_TRUE(b->copy_out());
  EXPECT_EQ(device_.pinned().stats().system_allocations, 1) << "one slot";
  EXPECT_EQ(out().advance(10), 0) << "the slot is still read";
  EXPECT_EQ(contents(*a), pattern(3));
  ASSERT_TRUE(b->evict());
  EXPECT_EQ(contents(*b), pattern(5));
}

TEST_F(StorageTest, SlotsReturnWithoutALoad) {
  StoragePtr a = make(), b = make();
  fill(*a, 3);
  evict(*a);
  ASSERT_TRUE(b->copy_out());
  EXPECT_GT(device_.pinned().stats().live, 0);
  a = StoragePtr();
  b = StoragePtr();
  EXPECT_EQ(device_.pinned().stats().live, 0);
}

TEST_F(StorageTest, ACapLeavesTheBytesWhereTheyAre) {
  device_.pinned().set_cap(10);
  const StoragePtr storage = make();
  fill(*storage, 3);
  EXPECT_FALSE(storage->copy_out());
  EXPECT_EQ(storage->residency(), Residency::kResident);
  EXPECT_FALSE(storage->evict());
  EXPECT_EQ(device_.pinned().stats().refusals, 1);
  EXPECT_EQ(contents(*storage), pattern(3));
}

TEST_F(StorageTest, DyingWhileLoadedKeepsTheBlockForTheLoad) {
  StoragePtr storage = make();
  fill(*storage, 3);
  evict(*storage);
  storage->load();
  storage = StoragePtr();
  const StoragePtr next = make();
  const std::vector<std::byte> other = pattern(13);
  compute().copy(next->acquire(compute(), true), other.data(), kBytes);
  next->release(compute(), true);
  compute().advance(10);
  in().advance(10);
  compute().advance(10);
  EXPECT_EQ(contents(*next), other) << "the load wrote over the next tensor";
}

TEST_F(StorageTest, IsEvictedAgainAfterALoad) {
  const StoragePtr storage = make();
  fill(*storage, 3);
  evict(*storage);
  storage->load();
  in().advance(10);
  compute().advance(10);
  // Nobody has touched it since; the finished load counts as resident.
  evict(*storage);
  EXPECT_EQ(contents(*storage), pattern(3));
}

TEST_F(StorageTest, DroppedBytesReturnToThePoolAndAreMadeAgain) {
  const StoragePtr storage = make();
  fill(*storage, 3);
  const uint32_t version = storage->version();
  int made = 0;
  storage->drop([&] {
    ++made;
    const StoragePtr again = make();
    fill(*again, 3);
    return again;
  });
  EXPECT_EQ(storage->residency(), Residency::kDropped);
  EXPECT_EQ(device_.pool().stats().live, 0);
  EXPECT_EQ(contents(*storage), pattern(3));
  EXPECT_EQ(contents(*storage), pattern(3));
  EXPECT_EQ(made, 1);
  EXPECT_EQ(storage->version(), version);
  EXPECT_EQ(device_.pool().stats().live, 128);
}

TEST_F(StorageTest, LiveCountsStorages) {
  const int64_t before = Storage::live();
  StoragePtr a = make();
  const StoragePtr b = a;
  EXPECT_EQ(a.use_count(), 2);
  EXPECT_EQ(Storage::live(), before + 1);
  a = make();
  EXPECT_EQ(b.use_count(), 1);
  EXPECT_NE(a->id(), b->id());
  EXPECT_EQ(Storage::live(), before + 2);
  a = StoragePtr();
  EXPECT_EQ(Storage::live(), before + 1);
}

using StorageDeathTest = StorageTest;

TEST_F(StorageDeathTest, StrictRefusesAnUnplannedReload) {
  const StoragePtr storage = make();
  fill(*storage, 3);
  evict(*storage);
  storage->set_strict(true);
  EXPECT_DEATH(storage->acquire(compute()), "used outside its plan");
}

TEST_F(StorageDeathTest, ARecomputeThatReadsItsOwnOutputIsAnError) {
  const StoragePtr storage = make();
  storage->drop([&] {
    storage->acquire(compute());
    return StoragePtr();
  });
  EXPECT_DEATH(storage->acquire(compute()), "is used while that runs");
}

TEST_F(StorageDeathTest, BytesThatSomebodyElseOverwroteAreFoundOut) {
  const StoragePtr a = make(), b = make();
  fill(*a, 3);
  fill(*b, 5);
  const auto share_a_slot = [&] {
    dropped_edge = Edge::kSlotIsLeased;
    evict(*a);
    evict(*b);
    a->load();
  };
  EXPECT_DEATH(share_a_slot(), "its pinned bytes were overwritten");
}

TEST_F(StorageDeathTest, IsNotFreedOrDroppedUnderALease) {
  StoragePtr storage = make();
  storage->acquire(compute());
  EXPECT_DEATH(storage->drop(nullptr), "dropped while in use");
  EXPECT_DEATH(storage = StoragePtr(), "freed while a kernel uses it");
  storage->release(compute(), false);
  EXPECT_DEATH(storage->release(compute(), false), "check failed");
}

TEST_F(StorageDeathTest, StatesFollowTheirOrder) {
  const StoragePtr storage = make();
  EXPECT_DEATH(storage->load(), "Resident");
  ASSERT_TRUE(storage->copy_out());
  EXPECT_DEATH(storage->copy_out(), "Copying");
  EXPECT_DEATH(storage->drop(nullptr), "Copying");
}

}  // namespace
}  // namespace tapeline
