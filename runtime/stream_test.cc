#include "runtime/stream.h"

#include "gtest/gtest.h"
#include "runtime/fake_stream.h"

namespace tapeline {
namespace {

TEST(Event, OfNoStreamIsDone) { EXPECT_TRUE(Event().done()); }

TEST(CpuStream, DoesEverythingAtOnce) {
  CpuStream stream("cpu");
  int from = 7, to = 0;
  stream.copy(&to, &from, sizeof(int));
  EXPECT_EQ(to, 7);
  EXPECT_TRUE(stream.record().done());
  EXPECT_EQ(stream.name(), "cpu");
  stream.copy(nullptr, nullptr, 0);
}

TEST(CpuStream, WaitingRunsTheOtherStreamsWork) {
  CpuStream cpu("cpu");
  FakeStream fake("fake");
  int from = 7, to = 0, later = 0;
  fake.copy(&to, &from, sizeof(int));
  const Event event = fake.record();
  fake.copy(&later, &from, sizeof(int));
  cpu.wait(event);
  EXPECT_EQ(to, 7);
  EXPECT_EQ(later, 0) << "only what the event covers";
}

TEST(FakeStream, CopiesWhenAdvanced) {
  FakeStream stream("s");
  int from = 1, to = 0;
  const Event before = stream.record();
  stream.copy(&to, &from, sizeof(int));
  const Event after = stream.record();
  EXPECT_TRUE(before.done());
  EXPECT_FALSE(after.done());
  from = 2;  // the copy reads what is there when it runs
  EXPECT_EQ(stream.advance(), 1);
  EXPECT_EQ(to, 2);
  EXPECT_TRUE(after.done());
  EXPECT_EQ(stream.bytes_copied(), 4);
  EXPECT_EQ(stream.advance(), 0);
}

TEST(FakeStream, StopsAtAWaitThatIsNotDone) {
  FakeStream a("a"), b("b");
  int one = 1, x = 0, y = 0;
  a.copy(&x, &one, sizeof(int));
  const Event event = a.record();
  b.wait(event);
  b.copy(&y, &x, sizeof(int));
  EXPECT_EQ(b.advance(10), 0);
  EXPECT_EQ(b.pending(), 2);
  a.advance();
  EXPECT_EQ(b.advance(10), 2);
  EXPECT_EQ(y, 1);
}

TEST(FakeStream, SynchronizingRunsWhatItWaitsFor) {
  FakeStream a("a"), b("b"), c("c");
  int one = 1, x = 0, y = 0, z = 0;
  a.copy(&x, &one, sizeof(int));
  b.wait(a.record());
  b.copy(&y, &x, sizeof(int));
  c.wait(b.record());
  c.copy(&z, &y, sizeof(int));
  c.synchronize(c.record());
  EXPECT_EQ(z, 1);
  EXPECT_EQ(a.pending() + b.pending() + c.pending(), 0);
}

TEST(FakeStream, SynchronizesToAnEventOfAnotherStream) {
  FakeStream a("a"), b("b");
  int one = 1, x = 0;
  a.copy(&x, &one, sizeof(int));
  b.synchronize(a.record());
  EXPECT_EQ(x, 1);
}

TEST(FakeStreamDeathTest, AnEventNeverIssuedIsAnError) {
  FakeStream stream("s");
  EXPECT_DEATH(stream.synchronize({&stream, 3}), "was never issued");
}

}  // namespace
}  // namespace tapeline
