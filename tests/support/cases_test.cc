#include "tests/support/cases.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

std::string printed_by(int stop_at) {
  testing::internal::CaptureStdout();
  int sum = 0;
  for (const int& c : each(std::vector<int>{1, 2, 3})) {
    if (c == stop_at) break;
    sum += c;
  }
  EXPECT_EQ(sum, stop_at == 0 ? 6 : stop_at * (stop_at - 1) / 2);
  return testing::internal::GetCapturedStdout();
}

TEST(Each, SaysHowManyCasesWereFinished) {
  setenv("TAPELINE_COUNT_CASES", "1", 1);
  EXPECT_EQ(printed_by(0), "[  CASES   ] 3 of 3\n");
  EXPECT_EQ(printed_by(3), "[  CASES   ] 2 of 3\n");
  EXPECT_EQ(printed_by(1), "[  CASES   ] 0 of 3\n");
  unsetenv("TAPELINE_COUNT_CASES");
  EXPECT_EQ(printed_by(0), "");
}

}  // namespace
}  // namespace tapeline
