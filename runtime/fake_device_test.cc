#include "runtime/fake_device.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/edge.h"
#include "runtime/storage.h"

namespace tapeline {
namespace {

using testing::Contains;
using testing::ContainsRegex;
using testing::HasSubstr;

StoragePtr make(FakeDevice& fake, size_t bytes) {
  return std::make_shared<Storage>(fake.device(), bytes, Tag::kActivation);
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
  const Block pinned =
      fake.device().pinned().allocate(200, Tag::kOther, &fake.copy_out());
  std::byte* const slot = pinned.data;
  const std::byte* bytes = b->acquire(fake.compute());
  EXPECT_TRUE(first.done());
  fake.copy_out().copy(slot, bytes, 100);
  EXPECT_EQ(fake.races(), 1) << fake.report();
  EXPECT_EQ(fake.compute().completed(), 4u);
  fake.copy_out().copy(slot + 100, bytes, 100);
  EXPECT_EQ(fake.races(), 1) << "all that is completed was asked for";
  b->release(fake.compute(), false);
  fake.finish();
  fake.device().pinned().free(pinned, {});
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

// --- steps -------------------------------------------------------------------

// Micro-batches with windows of saved bytes that go to the host and come back,
// as a training step moves them. A schedule is a line of moves: F0 is the
// forward of graph 0, B0 its backward, P0 loads its last window early, X0 drops
// it without a backward.
class Steps {
 public:
  Steps(Timing timing, uint64_t seed)
      : random_(seed), fake_(timing, seed), weight_(make(fake_, kBytes)) {
    fill(fake_, *weight_, value_);
  }
  ~Steps() {
    graphs_.clear();
    weight_ = StoragePtr();
  }

  void run(std::string_view schedule) {
    graphs_.resize(4);
    for (size_t i = 0; i < schedule.size(); i += 3) {
      std::vector<Window>& graph =
          graphs_[static_cast<size_t>(schedule[i + 1] - '0')];
      switch (schedule[i]) {
        case 'F':
          forward(graph);
          break;
        case 'B':
          backward(graph);
          break;
        case 'P':
          load(graph[kWindows - 2]);
          break;
        case 'X':
          graph.clear();
          break;
      }
    }
    update();
  }

  FakeDevice& fake() { return fake_; }
  int64_t wrong() const { return wrong_; }  // bytes

 private:
  struct Window {
    StoragePtr storage;
    int value;
  };
  static constexpr size_t kWindows = 4;
  static constexpr size_t kBytes = 5000;

  // Lengths differ by what size classes forgive, and by more.
  size_t bytes() { return 1000 + random_() % 3 * 4000 + random_() % 100; }

  // A temporary tensor of a kernel.
  void scratch() {
    const StoragePtr storage = make(fake_, bytes());
    fill(fake_, *storage, 0xee);
    check(*storage, 0xee);
  }
  void check(Storage& storage, int value) {
    wrong_ += differing(fake_, storage, value);
  }
  void load(Window& window) {
    const Residency at = window.storage->residency();
    if (at == Residency::kHost || at == Residency::kCopying) {
      window.storage->load();
    }
  }

  void forward(std::vector<Window>& graph) {
    for (size_t i = 0; i < kWindows; ++i) {
      value_ = value_ % 200 + 1;
      graph.push_back({make(fake_, bytes()), value_});
      Storage& storage = *graph.back().storage;
      fill(fake_, storage, value_);
      storage.copy_out();
      check(storage, value_);  // the next layer reads it
      scratch();
      if (i > 0) graph[i - 1].storage->evict();
      scratch();
    }
  }
  void backward(std::vector<Window>& graph) {
    while (!graph.empty()) {
      Window& window = graph.back();
      load(window);
      if (graph.size() > 1) load(graph[graph.size() - 2]);
      check(*window.storage, window.value);
      // A gradient that takes over the bytes of what was saved.
      if (random_() % 2 == 0) {
        fill(fake_, *window.storage, 0xdd);
        check(*window.storage, 0xdd);
      }
      graph.pop_back();
      scratch();
    }
  }
  // A weight that lives on the host between steps.
  void update() {
    check(*weight_, value_of_weight_);
    fill(fake_, *weight_, ++value_of_weight_);
    weight_->copy_out();
    check(*weight_, value_of_weight_);
    weight_->evict();
    scratch();
    weight_->load();
  }

  std::mt19937_64 random_;
  int value_ = 1, value_of_weight_ = 1;
  int64_t wrong_ = 0;
  FakeDevice fake_;
  StoragePtr weight_;
  std::vector<std::vector<Window>> graphs_;
};

constexpr std::string_view kSchedules[] = {
    "F0 B0",
    "F0 F1 B0 B1",
    "F0 F1 B1 B0",
    "F0 F1 P0 F2 B0 P1 F3 B1 P2 B2 B3",
    "F0 P0 F1 X0 F2 B1 F3 X3 B2",
};

struct Timed {
  Timing timing;
  uint64_t seed;
};
std::vector<Timed> all_timings() {
  std::vector<Timed> all;
  for (uint64_t seed : {1, 2, 3}) {
    all.push_back({Timing::kLate, seed});
    all.push_back({Timing::kSoon, seed});
  }
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    all.push_back({Timing::kRandom, seed});
  }
  return all;
}

TEST(Steps, AreOrderedAndTheirBytesAreRight) {
  for (const Timed& at : all_timings()) {
    for (std::string_view schedule : kSchedules) {
      SCOPED_TRACE(std::string(schedule) + " at timing " +
                   std::to_string(static_cast<int>(at.timing)) + " seed " +
                   std::to_string(at.seed));
      Steps steps(at.timing, at.seed);
      for (int step = 0; step < 4; ++step) steps.run(schedule);
      FakeDevice& fake = steps.fake();
      EXPECT_EQ(steps.wrong(), 0);
      // The host blocks only where a pinned slot gives way to a larger one.
      EXPECT_LT(fake.counts().synchronizations,
                fake.device().pinned().stats().system_allocations);
      EXPECT_GT(fake.copy_out().counts().copies, 0);
      EXPECT_GT(fake.copy_in().counts().copies, 0);
      fake.device().pool().trim();
      ASSERT_EQ(fake.races(), 0) << fake.report();
    }
  }
}

// --- without an edge ---------------------------------------------------------

class Dropped {
 public:
  explicit Dropped(Edge edge) { dropped_edge = edge; }
  ~Dropped() { dropped_edge = Edge::kNone; }
};

struct Seen {
  int64_t wrong = 0;  // bytes
  std::vector<std::string> races;
};

// What the same steps show without the edge.
Seen without(Edge edge) {
  const Dropped dropped(edge);
  Seen seen;
  for (uint64_t seed : {1, 2}) {
    for (Timing timing : {Timing::kLate, Timing::kRandom}) {
      for (std::string_view schedule : kSchedules) {
        Steps steps(timing, seed);
        for (int step = 0; step < 4; ++step) steps.run(schedule);
        seen.wrong += steps.wrong();
        const std::vector<std::string>& messages =
            steps.fake().checker().messages();
        seen.races.insert(seen.races.end(), messages.begin(), messages.end());
      }
    }
  }
  return seen;
}

testing::Matcher<Seen> races(const char* pattern) {
  return testing::Field("races", &Seen::races,
                        Contains(ContainsRegex(pattern)));
}
testing::Matcher<Seen> wrong_bytes() {
  return testing::Field("wrong", &Seen::wrong, testing::Gt(0));
}

TEST(Edges, BlockWaitsCopyOutIsMissedWhenDropped) {
  const Seen seen = without(Edge::kBlockWaitsCopyOut);
  EXPECT_THAT(seen, races("compute .* kernel writes block .* without waiting "
                          "until copy_out .* reads block"));
  // The event of a load that nobody used is among those that a block waits for.
  EXPECT_THAT(seen, races("compute .* kernel writes block .* without waiting "
                          "until copy_in .* writes block"));
  EXPECT_THAT(seen, wrong_bytes());
}

TEST(Edges, ResidentIsNotLoadedIsMissedWhenDropped) {
  const Seen seen = without(Edge::kResidentIsNotLoaded);
  EXPECT_THAT(seen, races("copy_in .* reads slot .* without waiting until "
                          "copy_out .* writes slot"));
  EXPECT_THAT(seen, races("copy_in .* writes block .* without waiting until "
                          "compute .* kernel reads block"));
  EXPECT_THAT(seen, wrong_bytes());
}

TEST(Edges, UseWaitsLoadIsMissedWhenDropped) {
  const Seen seen = without(Edge::kUseWaitsLoad);
  EXPECT_THAT(seen, races("compute .* kernel reads block .* without waiting "
                          "until copy_in .* writes block"));
  EXPECT_THAT(seen, wrong_bytes());
}

// Kernels execute when they are issued, so their bytes come out right.
TEST(Edges, LoadWaitsBlockIsMissedWhenDropped) {
  EXPECT_THAT(without(Edge::kLoadWaitsBlock),
              races("copy_in .* writes block .* without waiting until compute "
                    ".* kernel reads block"));
}

TEST(Edges, LoadWaitsCopyOutIsMissedWhenDropped) {
  const Seen seen = without(Edge::kLoadWaitsCopyOut);
  EXPECT_THAT(seen, races("copy_in .* reads slot .* without waiting until "
                          "copy_out .* writes slot"));
  EXPECT_THAT(seen, wrong_bytes());
}

TEST(Edges, SlotWaitsLoadIsMissedWhenDropped) {
  const Seen seen = without(Edge::kSlotWaitsLoad);
  EXPECT_THAT(seen, races("copy_out .* writes slot .* without waiting until "
                          "copy_in .* reads slot"));
  EXPECT_THAT(seen, wrong_bytes());
}

// Whether another owner came or not.
TEST(Edges, SlotIsLeasedIsMissedWhenDropped) {
  EXPECT_DEATH(without(Edge::kSlotIsLeased), "pinned bytes were overwritten");
  const Dropped dropped(Edge::kSlotIsLeased);
  FakeDevice fake;
  const StoragePtr a = make(fake, 100);
  fill(fake, *a, 3);
  ASSERT_TRUE(a->copy_out());
  ASSERT_TRUE(a->evict());
  EXPECT_EQ(fake.races(), 0) << "the copy out itself is right";
  EXPECT_DEATH(a->load(), "pinned bytes were overwritten");
}

TEST(FakeDevice, FindsAReadOfASlotThatNobodyOwns) {
  FakeDevice fake;
  const StoragePtr a = make(fake, 100);
  std::byte* bytes = a->acquire(fake.compute(), true);
  Pool& pinned = fake.device().pinned();
  const Block slot = pinned.allocate(100, Tag::kOther, &fake.copy_out());
  pinned.free(slot, {});
  fake.copy_in().wait(fake.compute().record());
  fake.copy_in().copy(bytes, slot.data, 100);
  a->release(fake.compute(), false);
  EXPECT_EQ(fake.checker().unowned(), 1);
  EXPECT_THAT(fake.report(),
              ContainsRegex("copy_in .* copy reads .*, which nobody owns"));
  fake.finish();
}

}  // namespace
}  // namespace tapeline
