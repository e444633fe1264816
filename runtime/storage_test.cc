#include "runtime/storage.h"

#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/access.h"
#include "runtime/fake_stream.h"

namespace tapeline {
namespace {

// A device whose compute stream, and two copy streams, move only when told to.
class StorageTest : public testing::Test {
 protected:
  StorageTest()
      : host_(kBytes, std::byte{0xEE}),
        out_("device_to_host"),
        in_("host_to_device"),
        send_("send"),
        device_(1, std::make_unique<FakeStream>("compute")),
        scope_(device_) {}

  ~StorageTest() override { compute().synchronize(compute().record()); }

  FakeStream& compute() { return static_cast<FakeStream&>(device_.compute()); }

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
    return StoragePtr(new Storage(device_, kBytes, Tag::kActivation));
  }
  // Moves a filled storage to the host.
  void evict(Storage& storage) {
    storage.begin_copy_out(out_, host_.data());
    out_.synchronize(out_.record());
    ASSERT_TRUE(storage.try_evict());
  }

  static constexpr size_t kBytes = 100;
  // Queued copies end when the device is destroyed, so what they touch and the
  // streams that they are on come first.
  std::vector<std::byte> host_;
  FakeStream out_, in_, send_;
  Device device_;
  DeviceScope scope_;
};

TEST_F(StorageTest, GoesOutAndComesBackWithItsBytesAndVersion) {
  const StoragePtr storage = make();
  storage->bump_version();
  fill(*storage, 3);
  const uint32_t version = storage->version();
  EXPECT_EQ(storage->residency(), Residency::kResident);

  storage->begin_copy_out(out_, host_.data());
  EXPECT_EQ(storage->residency(), Residency::kCopying);
  EXPECT_EQ(host_[5], std::byte{0xEE}) << "the copy runs later";
  EXPECT_FALSE(storage->try_evict()) << "the copy has not run";
  out_.synchronize(out_.record());
  EXPECT_EQ(host_, pattern(3));
  EXPECT_TRUE(storage->try_evict());
  EXPECT_EQ(storage->residency(), Residency::kHost);
  EXPECT_EQ(device_.pool().stats().live, 0);

  storage->begin_load(in_);
  EXPECT_EQ(storage->residency(), Residency::kLoading);
  EXPECT_EQ(device_.pool().stats().live, 128);
  in_.synchronize(in_.record());
  EXPECT_EQ(contents(*storage), pattern(3));
  EXPECT_EQ(storage->residency(), Residency::kResident);
  EXPECT_EQ(storage->version(), version);
  EXPECT_EQ(storage->leases(), 0);
}

TEST_F(StorageTest, IsNotEvictedUnderALease) {
  const StoragePtr storage = make();
  fill(*storage, 5);
  storage->begin_copy_out(out_, host_.data());
  out_.synchronize(out_.record());
  storage->acquire(compute());
  storage->acquire(compute());
  EXPECT_FALSE(storage->try_evict());
  storage->release(compute(), false);
  EXPECT_FALSE(storage->try_evict());
  storage->release(compute(), false);
  EXPECT_TRUE(storage->try_evict());
}

TEST_F(StorageTest, StaysReadableWhileItIsCopiedOut) {
  const StoragePtr storage = make();
  fill(*storage, 7);
  storage->begin_copy_out(out_, host_.data());
  EXPECT_EQ(contents(*storage), pattern(7));
  EXPECT_EQ(storage->residency(), Residency::kCopying);
}

TEST_F(StorageTest, TheCopyOutWaitsForTheWriter) {
  const StoragePtr storage = make();
  std::vector<std::byte> source = pattern(9);
  std::byte* bytes = storage->acquire(compute());
  compute().copy(bytes, source.data(), kBytes);  // a kernel not run yet
  storage->release(compute(), true);
  storage->begin_copy_out(out_, host_.data());
  EXPECT_EQ(out_.advance(10), 0) << "the writer has not run";
  compute().advance(10);
  out_.advance(10);
  EXPECT_EQ(host_, pattern(9));
}

TEST_F(StorageTest, TheReaderWaitsForTheLoad) {
  const StoragePtr storage = make();
  fill(*storage, 3);
  evict(*storage);
  storage->begin_load(in_);
  std::vector<std::byte> seen(kBytes);
  const std::byte* bytes = storage->acquire(compute());
  compute().copy(seen.data(), bytes, kBytes);
  storage->release(compute(), false);
  EXPECT_EQ(storage->residency(), Residency::kLoading);
  EXPECT_EQ(compute().advance(10), 0) << "the load has not run";
  in_.advance(10);
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
  storage->begin_load(in_);
  EXPECT_EQ(device_.pool().stats().system_allocations, 1) << "same block";
  in_.advance(10);
  compute().advance(10);
  EXPECT_EQ(seen, pattern(11));
  in_.advance(10);
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
  storage->begin_load(in_);
  EXPECT_EQ(contents(*storage), pattern(3));
  EXPECT_EQ(Storage::demand_reloads(), before);
}

TEST_F(StorageTest, ACancelledCopyLeavesItResident) {
  const StoragePtr storage = make();
  fill(*storage, 3);
  storage->begin_copy_out(out_, host_.data());
  storage->cancel_copy_out();
  EXPECT_EQ(storage->residency(), Residency::kResident);
  out_.advance(10);
  EXPECT_EQ(contents(*storage), pattern(3));
}

TEST_F(StorageTest, AWriteCancelsTheCopyOut) {
  const StoragePtr storage = make();
  fill(*storage, 3);
  storage->begin_copy_out(out_, host_.data());
  out_.advance(10);
  std::byte* bytes = storage->acquire(compute(), true);
  EXPECT_EQ(storage->residency(), Residency::kResident);
  std::memcpy(bytes, pattern(13).data(), kBytes);
  storage->release(compute(), true);
  EXPECT_FALSE(storage->try_evict()) << "the host has the old bytes";
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
    storage->begin_copy_out(out_, host_.data());
  }
  const StoragePtr next = make();
  const std::vector<std::byte> other = pattern(13);
  compute().copy(next->acquire(compute(), true), other.data(), kBytes);
  next->release(compute(), true);
  compute().advance(10);
  out_.advance(10);
  EXPECT_EQ(host_, pattern(3)) << "the block was reused under the copy";
}

TEST_F(StorageTest, DyingWhileLoadedKeepsTheBlockForTheLoad) {
  StoragePtr storage = make();
  fill(*storage, 3);
  evict(*storage);
  storage->begin_load(in_);
  storage = StoragePtr();
  const StoragePtr next = make();
  const std::vector<std::byte> other = pattern(13);
  compute().copy(next->acquire(compute(), true), other.data(), kBytes);
  next->release(compute(), true);
  compute().advance(10);
  in_.advance(10);
  compute().advance(10);
  EXPECT_EQ(contents(*next), other) << "the load wrote over the next tensor";
}

TEST_F(StorageTest, IsEvictedAgainAfterALoad) {
  const StoragePtr storage = make();
  fill(*storage, 3);
  evict(*storage);
  storage->begin_load(in_);
  in_.advance(10);
  compute().advance(10);
  // Nobody has touched it since; the finished load counts as resident.
  evict(*storage);
  EXPECT_EQ(contents(*storage), pattern(3));
}

TEST_F(StorageTest, DroppedBytesReturnToThePoolAndRefill) {
  const StoragePtr storage = make();
  fill(*storage, 3);
  storage->drop();
  EXPECT_EQ(storage->residency(), Residency::kDropped);
  EXPECT_EQ(device_.pool().stats().live, 0);
  storage->refill();
  fill(*storage, 5);
  EXPECT_EQ(contents(*storage), pattern(5));
}

TEST_F(StorageTest, LiveCountsStorages) {
  const int64_t before = Storage::live();
  StoragePtr a = make();
  const StoragePtr b = a;
  EXPECT_FALSE(a.unique());
  EXPECT_EQ(Storage::live(), before + 1);
  a = make();
  EXPECT_TRUE(b.unique());
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

TEST_F(StorageDeathTest, DroppedBytesAreNotUsed) {
  const StoragePtr storage = make();
  storage->drop();
  EXPECT_DEATH(storage->acquire(compute()), "dropped for recompute");
}

TEST_F(StorageDeathTest, IsNotFreedOrDroppedUnderALease) {
  StoragePtr storage = make();
  storage->acquire(compute());
  EXPECT_DEATH(storage->drop(), "dropped while in use");
  EXPECT_DEATH(storage = StoragePtr(), "freed while a kernel uses it");
  storage->release(compute(), false);
  EXPECT_DEATH(storage->release(compute(), false), "check failed");
}

TEST_F(StorageDeathTest, StatesFollowTheirOrder) {
  const StoragePtr storage = make();
  EXPECT_DEATH(storage->begin_load(in_), "Resident");
  EXPECT_DEATH(storage->refill(), "Resident");
  EXPECT_DEATH(storage->cancel_copy_out(), "Resident");
  storage->begin_copy_out(out_, host_.data());
  EXPECT_DEATH(storage->begin_copy_out(out_, host_.data()), "Copying");
  EXPECT_DEATH(storage->drop(), "Copying");
}

}  // namespace
}  // namespace tapeline
