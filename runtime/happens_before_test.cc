#include "runtime/happens_before.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class HappensBeforeTest : public testing::Test {
 protected:
  HappensBeforeTest() { checker_.own(memory_, sizeof(memory_), "block"); }

  uint64_t touch(int stream, bool write, size_t begin = 0, size_t bytes = 8) {
    const HappensBefore::Access accesses[] = {{memory_ + begin, bytes, write}};
    return checker_.operation(stream, write ? "fill" : "sum", accesses);
  }
  uint64_t write(int stream, size_t begin = 0, size_t bytes = 8) {
    return touch(stream, true, begin, bytes);
  }
  uint64_t read(int stream, size_t begin = 0, size_t bytes = 8) {
    return touch(stream, false, begin, bytes);
  }

  std::byte memory_[64];
  HappensBefore checker_;
  const int a_ = checker_.add_stream("a"), b_ = checker_.add_stream("b"),
            c_ = checker_.add_stream("c");
};

TEST_F(HappensBeforeTest, NamesBothSidesOfARace) {
  write(a_, 0, 16);
  read(b_, 8, 4);
  EXPECT_EQ(checker_.races(), 1);
  EXPECT_THAT(checker_.messages(),
              ElementsAre("b #1 sum reads block 1 [8, 12) without waiting "
                          "until a #1 fill writes block 1 [0, 16)"));
}

TEST_F(HappensBeforeTest, OneOfThePairMustWriteAndTheBytesMustOverlap) {
  read(a_);
  read(b_);
  write(c_, 8);
  EXPECT_EQ(checker_.races(), 0);
  write(c_, 7, 1);
  EXPECT_EQ(checker_.races(), 2) << "of two readers";
  write(a_, 15, 1);
  EXPECT_EQ(checker_.races(), 3) << "of two writers";
}

TEST_F(HappensBeforeTest, AStreamIsInOrder) {
  write(a_);
  read(a_);
  write(a_);
  EXPECT_EQ(checker_.races(), 0);
}

TEST_F(HappensBeforeTest, AWaitOrdersWhatWasBeforeItsPoint) {
  const uint64_t first = write(a_);
  write(a_, 8);
  checker_.wait(b_, a_, first);
  read(b_);
  EXPECT_EQ(checker_.races(), 0);
  read(b_, 8);
  EXPECT_EQ(checker_.races(), 1) << "written after the point";
}

TEST_F(HappensBeforeTest, AWaitIsOneWay) {
  const uint64_t first = read(a_);
  checker_.wait(b_, a_, first);
  write(b_);
  EXPECT_EQ(checker_.races(), 0);
  read(a_);
  EXPECT_EQ(checker_.races(), 1);
}

TEST_F(HappensBeforeTest, WaitsAddUp) {
  write(a_);
  checker_.wait(b_, a_, checker_.point(a_));
  checker_.wait(c_, b_, checker_.point(b_));
  write(c_);
  EXPECT_EQ(checker_.races(), 0);
}

TEST_F(HappensBeforeTest, APointKnowsOnlyWhatItsStreamKnewThen) {
  write(a_);
  const uint64_t early = checker_.point(b_);
  checker_.wait(b_, a_, checker_.point(a_));
  checker_.wait(c_, b_, early);
  read(c_);
  EXPECT_EQ(checker_.races(), 1);
}

TEST_F(HappensBeforeTest, WhatTheHostSawOrdersWhatItIssuesLater) {
  const uint64_t first = write(a_);
  write(a_, 8);
  checker_.observe(a_, first);
  read(b_);
  read(HappensBefore::kHost);
  EXPECT_EQ(checker_.races(), 0);
  read(b_, 8);
  EXPECT_EQ(checker_.races(), 1) << "not seen yet";
}

TEST_F(HappensBeforeTest, WhatTheHostTouchesIsBeforeWhatItIssuesLater) {
  write(HappensBefore::kHost);
  write(a_);
  EXPECT_EQ(checker_.races(), 0);
  read(HappensBefore::kHost);
  EXPECT_EQ(checker_.races(), 1) << "nobody waited for a";
}

TEST_F(HappensBeforeTest, ALaterReadStandsForTheEarlierOnesOfItsStream) {
  const uint64_t first = read(a_);
  read(a_);
  checker_.wait(b_, a_, first);
  write(b_);
  EXPECT_EQ(checker_.races(), 1) << "the second read is still under way";
}

TEST_F(HappensBeforeTest, AWriteFollowsEveryReader) {
  write(a_);
  checker_.wait(b_, a_, checker_.point(a_));
  checker_.wait(c_, a_, checker_.point(a_));
  read(b_);
  read(c_);
  checker_.wait(a_, b_, checker_.point(b_));
  write(a_);
  EXPECT_EQ(checker_.races(), 1);
  EXPECT_THAT(checker_.messages()[0], HasSubstr("until c #2 sum reads"));
}

TEST_F(HappensBeforeTest, ANewOwnerFollowsTheOldOnesUsers) {
  write(a_);
  checker_.disown(memory_);
  checker_.own(memory_, 32, "block");
  write(b_, 4, 8);
  EXPECT_EQ(checker_.races(), 1);
  EXPECT_THAT(checker_.messages(),
              ElementsAre("b #1 fill writes block 2 [4, 12) without waiting "
                          "until a #1 fill writes block 1 [0, 8)"));
  checker_.wait(c_, b_, checker_.point(b_));
  write(c_, 4, 8);
  EXPECT_EQ(checker_.races(), 1);
}

TEST_F(HappensBeforeTest, OnlyOwnedBytesMayBeTouched) {
  read(a_, 60, 4);
  EXPECT_EQ(checker_.unowned(), 0);
  read(a_, 60, 5);
  EXPECT_EQ(checker_.unowned(), 1) << "beyond the end";
  checker_.disown(memory_);
  read(a_);
  EXPECT_EQ(checker_.unowned(), 2) << "after it was freed";
  checker_.own(memory_ + 8, 8, "block");
  read(a_, 4, 8);
  EXPECT_EQ(checker_.unowned(), 3) << "before the beginning";
  EXPECT_EQ(checker_.races(), 0);
  EXPECT_THAT(checker_.messages()[1], HasSubstr("which nobody owns"));
}

TEST_F(HappensBeforeTest, BytesLeaveWhenTheHostHasSeenTheirUsersDone) {
  write(a_);
  read(b_, 16);
  checker_.disown(memory_);
  checker_.observe(a_, checker_.point(a_));
  checker_.forget(memory_, 64);
  EXPECT_EQ(checker_.races(), 1);
  EXPECT_THAT(checker_.messages()[0], HasSubstr("b #1 sum reads"));
  // Other memory at the same address.
  checker_.own(memory_, 64, "block");
  write(c_, 0, 64);
  EXPECT_EQ(checker_.races(), 1);
}

TEST_F(HappensBeforeTest, HistoryIsKeptByteByByte) {
  write(a_, 0, 30);
  write(a_, 10, 10);
  const uint64_t before = checker_.point(a_);
  write(a_, 12, 3);
  checker_.wait(b_, a_, before);
  for (size_t i = 0; i < 64; ++i) {
    const int64_t races = checker_.races();
    read(b_, i, 1);
    EXPECT_EQ(checker_.races() > races, i >= 12 && i < 15) << i;
  }
}

using HappensBeforeDeathTest = HappensBeforeTest;

TEST_F(HappensBeforeDeathTest, BytesHaveOneOwner) {
  EXPECT_DEATH(checker_.own(memory_ + 60, 8, "slot"), "slot owned twice");
  EXPECT_DEATH(checker_.disown(memory_ + 1), "nobody owns");
  EXPECT_DEATH(checker_.wait(a_, b_, 1), "check failed");
}

}  // namespace
}  // namespace tapeline
