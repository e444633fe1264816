#include "runtime/device_marks.h"

#include <chrono>
#include <thread>

#include "gtest/gtest.h"
#include "runtime/stream.h"

namespace tapeline {
namespace {

TEST(DeviceMarks, CountFromTheFirstInTheOrderOfMarking) {
  const CpuStream compute("compute"), line("line");
  DeviceMarks marks;
  for (int round = 0; round < 2; ++round) {
    marks.clear();
    EXPECT_EQ(marks.mark(compute), 0u);
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    EXPECT_EQ(marks.mark(line), 1u);
    EXPECT_EQ(marks.mark(compute), 2u);
    EXPECT_EQ(marks.ms(0), 0);
    EXPECT_GE(marks.ms(1), 3);
    EXPECT_GE(marks.ms(2), marks.ms(1));
  }
}

TEST(DeviceMarksDeathTest, HaveNoMarkThatWasCleared) {
  const CpuStream compute("compute");
  DeviceMarks marks;
  marks.mark(compute);
  marks.clear();
  EXPECT_DEATH(marks.ms(0), "0 of 0");
}

}  // namespace
}  // namespace tapeline
