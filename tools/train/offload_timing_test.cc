#include "tools/train/offload_timing.h"

#include <vector>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

TEST(OffloadTiming, OnlyCopiesThatHideAreMade) {
  const auto windows = plan_windows(
      {{0, 100, 0, -1}, {1, 100, 0, -1}, {2, 100, 0, -1}, {3, 100, 0, -1}},
      {true, false, {}});
  const std::vector<double> seconds = {1, 2, 3, 4};
  const auto layers = [&](double rate) {
    return layers_that_hide(windows, seconds, rate);
  };
  // Copies of a second each: the third ends with the pass. The last window is
  // there to load the one before it.
  EXPECT_EQ(layers(100), (std::vector<bool>{true, true, true, true}));
  // Two seconds: the first alone hides, and one behind it that loads it.
  EXPECT_EQ(layers(50), (std::vector<bool>{true, true}));
  EXPECT_EQ(layers(1), (std::vector<bool>{false}));
  const auto moved = [&](double rate) {
    return planned_bytes(plan_windows(
        {{0, 100, 0, -1}, {1, 100, 0, -1}, {2, 100, 0, -1}, {3, 100, 0, -1}},
        {true, false, layers(rate)}));
  };
  EXPECT_EQ(moved(100), 300);
  EXPECT_EQ(moved(50), 100);
  EXPECT_EQ(moved(1), 0);
}

}  // namespace
}  // namespace tapeline
