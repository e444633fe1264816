#include "runtime/profile.h"

#include <chrono>
#include <thread>

#include "gtest/gtest.h"
#include "runtime/json.h"

namespace tapeline {
namespace {

void spin(std::chrono::microseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
  }
}
constexpr std::chrono::microseconds kMs{1000};

class ProfileTest : public testing::Test {
 protected:
  void SetUp() override { reset_profile(); }
  void TearDown() override {
    set_profile(ProfileMode::kOff);
    reset_profile();
  }
  static ProfileRow row(Range range) {
    for (const ProfileRow& row : profile_report()) {
      if (row.range == range) return row;
    }
    return {range};
  }
};

TEST_F(ProfileTest, IsOffByDefault) {
  { ProfileRange range(Range::kMatmul); }
  EXPECT_TRUE(profile_report().empty());
}

TEST_F(ProfileTest, SelfTimeLeavesInnerRangesOut) {
  set_profile(ProfileMode::kCount);
  {
    ProfileRange outer(Range::kForward);
    spin(2 * kMs);
    for (int i = 0; i < 3; ++i) {
      ProfileRange inner(Range::kMatmul);
      spin(1 * kMs);
    }
  }
  const ProfileRow forward = row(Range::kForward);
  const ProfileRow matmul = row(Range::kMatmul);
  EXPECT_EQ(forward.count, 1);
  EXPECT_EQ(matmul.count, 3);
  EXPECT_GE(matmul.self_ns, 3'000'000);
  EXPECT_EQ(matmul.self_ns, matmul.total_ns);
  EXPECT_GE(forward.self_ns, 2'000'000);
  // Exact, however slow the machine: the times are the same readings.
  EXPECT_EQ(forward.total_ns, forward.self_ns + matmul.total_ns);
}

TEST_F(ProfileTest, ARangeInsideItselfAddsNoTotal) {
  set_profile(ProfileMode::kCount);
  {
    ProfileRange outer(Range::kReplay);
    ProfileRange inner(Range::kReplay);
    spin(1 * kMs);
  }
  const ProfileRow replay = row(Range::kReplay);
  EXPECT_EQ(replay.count, 2);
  EXPECT_EQ(replay.total_ns, replay.self_ns);
}

TEST_F(ProfileTest, RowsAreSortedBySelfTime) {
  set_profile(ProfileMode::kCount);
  { ProfileRange range(Range::kData); }
  {
    ProfileRange range(Range::kWait);
    spin(20 * kMs);
  }
  const std::vector<ProfileRow> rows = profile_report();
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].range, Range::kWait);
  EXPECT_NE(profile_table().find("wait                        1"),
            std::string::npos)
      << profile_table();
}

TEST_F(ProfileTest, SumsOverThreadsThatHaveEnded) {
  set_profile(ProfileMode::kCount);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 100; ++i) ProfileRange range(Range::kTopK);
    });
  }
  for (int i = 0; i < 100; ++i) profile_report();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(row(Range::kTopK).count, 400);
}

TEST_F(ProfileTest, TurningOffInsideARangeKeepsTheSumsRight) {
  {
    ProfileRange unmeasured(Range::kStep);
    set_profile(ProfileMode::kCount);
    ProfileRange measured(Range::kData);
    set_profile(ProfileMode::kOff);
  }
  EXPECT_EQ(row(Range::kStep).count, 0);
  EXPECT_EQ(row(Range::kData).count, 1);
  set_profile(ProfileMode::kCount);
  { ProfileRange again(Range::kStep); }
  EXPECT_EQ(row(Range::kStep).total_ns, row(Range::kStep).self_ns);
}

TEST_F(ProfileTest, WritesAChromeTrace) {
  set_profile(ProfileMode::kTrace);
  {
    ProfileRange outer(Range::kStep);
    ProfileRange inner(Range::kMatmul);
    spin(1 * kMs);
  }
  std::thread([] { ProfileRange range(Range::kRoute); }).join();
  const std::string path = testing::TempDir() + "trace.json";
  ASSERT_TRUE(write_chrome_trace(path, 3).ok());
  const auto trace = read_json(path);
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(trace->find("dropped")->integer(), 0);
  const Json::Array& events = trace->find("traceEvents")->array();
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0].find("args")->find("name")->string(), "rank 3");
  // Inner ranges end first.
  const Json &matmul = events[1], &step = events[2], &route = events[3];
  EXPECT_EQ(matmul.find("name")->string(), "matmul");
  EXPECT_EQ(step.find("name")->string(), "step");
  EXPECT_EQ(route.find("name")->string(), "route");
  EXPECT_EQ(step.find("ts")->number(), 0.0);
  EXPECT_GE(matmul.find("dur")->number(), 1000.0);
  EXPECT_GE(step.find("dur")->number(), matmul.find("dur")->number());
  EXPECT_EQ(step.find("pid")->integer(), 3);
  EXPECT_NE(route.find("tid")->integer(), step.find("tid")->integer());
}

TEST_F(ProfileTest, CountingKeepsNoEvents) {
  set_profile(ProfileMode::kCount);
  { ProfileRange range(Range::kStep); }
  const std::string path = testing::TempDir() + "trace.json";
  ASSERT_TRUE(write_chrome_trace(path).ok());
  EXPECT_EQ(read_json(path)->find("traceEvents")->array().size(), 1u);
}

TEST(Range, NamesAreDistinct) {
  for (int a = 0; a < kRanges; ++a) {
    EXPECT_FALSE(name_of(static_cast<Range>(a)).empty());
    for (int b = 0; b < a; ++b) {
      EXPECT_NE(name_of(static_cast<Range>(a)), name_of(static_cast<Range>(b)));
    }
  }
}

}  // namespace
}  // namespace tapeline
