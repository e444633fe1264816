#include "runtime/fake_device.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/storage.h"

namespace tapeline {
namespace {

using testing::HasSubstr;

StoragePtr make(FakeDevice& fake, size_t bytes) {
  return StoragePtr(new Storage(fake.device(), bytes, Tag::kActivation));
}
// A kernel that writes all bytes.
void fill(FakeDevice& fake, Storage& storage, int value) {
  std::byte* bytes = storage.acquire(fake.compute(), true);
  std::memset(bytes, value, storage.bytes());
  storage.release(fake.compute(), true);
}
// A kernel that reads all bytes: how many are not `value`.
int64_t differing(FakeDevice& fake, Storage& storage, int value) {
  const std::byte* bytes = storage.acquire(fake.compute());
  const auto same =
      std::count(bytes, bytes + storage.bytes(), static_cast<std::byte>(value));
  storage.release(fake.compute(), false);
  return static_cast<int64_t>(storage.bytes()) - same;
}

// --- the streams -------------------------------------------------------------

TEST(CheckedStream, LateCopiesRunWhenTheComputeStreamWaits) {
  FakeDevice fake(Timing::kLate);
  const StoragePtr a = make(fake, 100);
  fill(fake, *a, 3);
  make(fake, 100);  // an idle block, which the load will get
  ASSERT_TRUE(a->copy_out());
  ASSERT_TRUE(a->evict());
  a->load();
  EXPECT_EQ(fake.copy_out().bytes_copied(), 0);
  EXPECT_EQ(fake.copy_in().bytes_copied(), 0);
  EXPECT_EQ(differing(fake, *a, 3), 0);
  EXPECT_EQ(fake.copy_out().bytes_copied(), 100) << "the load waits for it";
  EXPECT_EQ(fake.copy_in().bytes_copied(), 100);
  EXPECT_FALSE(a->ready().done()) << "it ran, but nobody told the host";
  EXPECT_EQ(a->residency(), Residency::kLoading);
  fake.finish();
  EXPECT_EQ(a->residency(), Residency::kResident);
  EXPECT_EQ(fake.copy_in().pending(), 0);
  EXPECT_EQ(fake.races(), 0) << fake.report();
}

TEST(CheckedStream, SoonMeansAtOnce) {
  FakeDevice fake(Timing::kSoon);
  const StoragePtr a = make(fake, 100);
  fill(fake, *a, 3);
  EXPECT_TRUE(a->ready().done());
  ASSERT_TRUE(a->copy_out());
  EXPECT_EQ(fake.copy_out().bytes_copied(), 100);
  ASSERT_TRUE(a->evict());
  a->load();
  EXPECT_EQ(a->residency(), Residency::kResident);
  EXPECT_EQ(differing(fake, *a, 3), 0);
  EXPECT_EQ(fake.counts().waits, 0) << "everything was seen done";
  EXPECT_EQ(fake.races(), 0) << fake.report();
}

TEST(CheckedStream, RandomTimesAreThoseOfTheSeed) {
  const auto trace = [](uint64_t seed) {
    FakeDevice fake(Timing::kRandom, seed);
    std::vector<int64_t> seen;
    for (int i = 0; i < 20; ++i) {
      const StoragePtr a = make(fake, 100);
      fill(fake, *a, 3);
      EXPECT_TRUE(a->copy_out());
      EXPECT_TRUE(a->evict());
      a->load();
      seen.push_back(fake.copy_out().bytes_copied());
      seen.push_back(fake.copy_out().pending() + fake.copy_in().pending());
      EXPECT_EQ(differing(fake, *a, 3), 0);
    }
    EXPECT_EQ(fake.races(), 0) << fake.report();
    return seen;
  };
  EXPECT_EQ(trace(1), trace(1));
  EXPECT_NE(trace(1), trace(2));
}

TEST(CheckedStream, AdvanceStopsAtAWait) {
  FakeDevice fake;
  const StoragePtr a = make(fake, 100);
  fill(fake, *a, 3);
  ASSERT_TRUE(a->copy_out());
  EXPECT_EQ(fake.copy_out().advance(5), 0) << "the kernel is not done";
  EXPECT_EQ(fake.compute().advance(5), 2);
  EXPECT_EQ(fake.copy_out().advance(1), 1);
  EXPECT_EQ(fake.copy_out().bytes_copied(), 0);
  EXPECT_EQ(fake.copy_out().advance(5), 1);
  EXPECT_EQ(fake.copy_out().bytes_copied(), 100);
}

TEST(CheckedStream, AskingForOneEventOrdersNothingLater) {
  FakeDevice fake;
  const StoragePtr a = make(fake, 100), b = make(fake, 100);
  fill(fake, *a, 1);
  const Event first = fake.compute().record();
  fill(fake, *b, 2);
  fake.compute().advance(10);
  std::byte* slot = fake.device().pinned().lease(200)->data;
  const std::byte* bytes = b->acquire(fake.compute());
  EXPECT_TRUE(first.done());
  fake.copy_out().copy(slot, bytes, 100);
  EXPECT_EQ(fake.races(), 1) << fake.report();
  EXPECT_EQ(fake.compute().completed(), 4u);
  fake.copy_out().copy(slot + 100, bytes, 100);
  EXPECT_EQ(fake.races(), 1) << "all that is completed was asked for";
  b->release(fake.compute(), false);
  fake.finish();
}

TEST(CheckedStream, CountsWhatWasAskedOfIt) {
  FakeDevice fake;
  const StoragePtr a = make(fake, 100);
  fill(fake, *a, 3);
  ASSERT_TRUE(a->copy_out());
  const CheckedStream::Counts& out = fake.copy_out().counts();
  EXPECT_EQ(out.copies, 1);
  EXPECT_EQ(out.bytes, 100);
  EXPECT_EQ(out.waits, 1);
  EXPECT_EQ(out.records, 1);
  EXPECT_EQ(out.uses, 0);
  EXPECT_EQ(fake.compute().counts().uses, 2) << "its begin and its end";
  EXPECT_EQ(fake.counts().synchronizations, 0);
  fake.compute().synchronize(a->ready());
  EXPECT_EQ(fake.counts().synchronizations, 1);
  EXPECT_THAT(fake.report(),
              HasSubstr("copy_out: 0 uses, 1 copies of 100 bytes, 1 waits, 1 "
                        "records, 0 synchronizations"));
  fake.finish();
}

TEST(FakeDevice, FindsAUseOfMemoryThatWasGivenBack) {
  FakeDevice fake;
  StoragePtr a = make(fake, 100);
  fill(fake, *a, 3);
  const std::byte* bytes = a->acquire(fake.compute());
  a->release(fake.compute(), false);
  a = StoragePtr();
  fake.compute().access(bytes, 100, false);
  EXPECT_EQ(fake.races(), 1);
  const std::vector<std::byte> local(64);
  fake.compute().access(local.data(), 64, false);
  EXPECT_EQ(fake.races(), 2) << "never declared";
  EXPECT_THAT(fake.report(), HasSubstr("2 accesses to what nobody owns"));
}

TEST(FakeDevice, FindsAnAccessUnderALeaseThatNothingOrders) {
  FakeDevice fake;
  const StoragePtr a = make(fake, 100);
  fill(fake, *a, 3);
  std::byte* bytes = a->acquire(fake.compute(), true);
  // The kernel is not over, and what is recorded now does not say so.
  const Event begun = fake.compute().record();
  fake.copy_out().wait(begun);
  ASSERT_TRUE(a->copy_out());
  EXPECT_EQ(fake.races(), 0) << fake.report();
  bytes[0] = std::byte{4};
  a->release(fake.compute(), true);
  EXPECT_EQ(fake.races(), 1) << fake.report();
  fake.finish();
}

TEST(FakeDevice, PoisonsFreedBlocksWhenTheHostKnowsThemIdle) {
  FakeDevice fake(Timing::kSoon);
  StoragePtr a = make(fake, 128);
  fill(fake, *a, 3);
  const std::byte* bytes = a->acquire(fake.compute());
  a->release(fake.compute(), false);
  a = StoragePtr();
  EXPECT_EQ(bytes[0], std::byte{0xff});
  EXPECT_EQ(bytes[1], std::byte{0x7f});
}

TEST(FakeDeviceDeathTest, WaitsForItsOwnStreamsOnly) {
  FakeDevice fake, other;
  EXPECT_DEATH(fake.compute().wait(other.compute().record()),
               "which is not of its device");
}

// --- orders that steps may never take ----------------------------------------

TEST(StorageOrder, AWriteFollowsACopyThatWasCancelled) {
  FakeDevice fake;
  const StoragePtr a = make(fake, 100);
  fill(fake, *a, 3);
  ASSERT_TRUE(a->copy_out());
  a->load();
  fill(fake, *a, 4);
  EXPECT_EQ(fake.races(), 0) << fake.report();
}

TEST(StorageOrder, ASlotOutlivesACopyThatWasCancelled) {
  FakeDevice fake;
  StoragePtr a = make(fake, 100), b = make(fake, 100);
  for (const StoragePtr& storage : {a, b}) {
    fill(fake, *storage, 3);
    ASSERT_TRUE(storage->copy_out());
  }
  a->load();
  b = StoragePtr();
  const StoragePtr larger = make(fake, 5000);  // free slots give way
  fill(fake, *larger, 5);
  ASSERT_TRUE(larger->copy_out());
  EXPECT_EQ(fake.races(), 0) << fake.report();
  fake.finish();
}

TEST(StorageOrder, LoadedBytesMayMoveOnBeforeTheirLoadIsDone) {
  FakeDevice fake;
  const StoragePtr a = make(fake, 100);
  fill(fake, *a, 3);
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(a->copy_out());
    ASSERT_TRUE(a->evict());
    a->load();
    EXPECT_EQ(a->residency(), Residency::kLoading);
  }
  EXPECT_EQ(differing(fake, *a, 3), 0);
  a->drop([&] {
    const StoragePtr again = make(fake, 100);
    fill(fake, *again, 4);
    return again;
  });
  EXPECT_EQ(differing(fake, *a, 4), 0);
  EXPECT_EQ(fake.races(), 0) << fake.report();
}

TEST(StorageOrder, ARecomputedBlockKeepsItsCopyOut) {
  FakeDevice fake;
  StoragePtr a = make(fake, 100);
  a->drop([&] {
    const StoragePtr again = make(fake, 100);
    fill(fake, *again, 4);
    EXPECT_TRUE(again->copy_out());
    return again;
  });
  EXPECT_EQ(differing(fake, *a, 4), 0);
  a = StoragePtr();
  const StoragePtr next = make(fake, 100);
  fill(fake, *next, 5);
  EXPECT_EQ(fake.races(), 0) << fake.report();
}

TEST(StorageOrder, HoldsForReadersOnOtherStreams) {
  FakeDevice fake;
  StoragePtr a = make(fake, 100);
  fill(fake, *a, 3);
  a->acquire(fake.copy_in());
  a->release(fake.copy_in(), false);
  fill(fake, *a, 4);
  a->acquire(fake.copy_in());
  a->release(fake.copy_in(), false);
  a = StoragePtr();
  const StoragePtr next = make(fake, 100);
  fill(fake, *next, 5);
  EXPECT_EQ(fake.races(), 0) << fake.report();
}

}  // namespace
}  // namespace tapeline
