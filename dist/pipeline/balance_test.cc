#include "dist/pipeline/balance.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "dist/pipeline/schedule.h"
#include "gtest/gtest.h"
#include "runtime/random.h"

namespace tapeline {
namespace {

// Every cut there is.
void for_each_cut(size_t parts, size_t stages,
                  const std::function<void(const std::vector<size_t>&)>& f) {
  std::vector<size_t> ends;
  const std::function<void(size_t)> go = [&](size_t at) {
    if (ends.size() + 1 == stages) {
      ends.push_back(parts);
      f(ends);
      ends.pop_back();
      return;
    }
    for (size_t end = at; end <= parts; ++end) {
      ends.push_back(end);
      go(end);
      ends.pop_back();
    }
  };
  go(0);
}

double squares(const std::vector<double>& times,
               const std::vector<size_t>& ends) {
  double sum = 0;
  size_t at = 0;
  for (const size_t end : ends) {
    double stage = 0;
    for (; at < end; ++at) stage += times[at];
    sum += stage * stage;
  }
  return sum;
}

// By rank, not by way of the code under test.
double most(const std::vector<double>& times, const std::vector<int>& placement,
            const std::vector<size_t>& ends) {
  std::vector<double> load(placement.size(), 0);
  for (size_t part = 0; part < times.size(); ++part) {
    size_t stage = 0;
    while (part >= ends[stage]) ++stage;
    load[placement[stage]] += times[part];
  }
  return *std::max_element(load.begin(), load.end());
}

TEST(Balance, FindsTheBestOfAllCuts) {
  const Random random(1, "balance");
  uint64_t at = 0;
  int uneven = 0;
  for (int n = 0; n < 300; ++n) {
    const int ranks = 1 + static_cast<int>(random.below(3, at++));
    const int chunks = 1 + static_cast<int>(random.below(3, at++));
    std::vector<int> placement = loop_placement(ranks, chunks);
    if (chunks == 2 && random.below(2, at++) == 0) {
      placement = v_placement(ranks);
    }
    std::vector<double> times(1 + random.below(9, at++));
    for (double& t : times) t = static_cast<double>(random.below(12, at++));
    const double slack = n % 2 == 0 ? 0 : 0.1;

    double least = std::numeric_limits<double>::infinity(), even = least;
    for_each_cut(times.size(), placement.size(), [&](const auto& ends) {
      least = std::min(least, most(times, placement, ends));
    });
    for_each_cut(times.size(), placement.size(), [&](const auto& ends) {
      if (most(times, placement, ends) <= least * (1 + slack) + 1e-9) {
        even = std::min(even, squares(times, ends));
      }
    });
    const BalancedCut found = balanced_cut(times, placement, slack);
    EXPECT_TRUE(found.proven);
    EXPECT_NEAR(found.least, least, 1e-9);
    ASSERT_EQ(found.cut.ends.size(), placement.size());
    EXPECT_EQ(found.cut.ends.back(), times.size());
    EXPECT_NEAR(found.cut.busiest, most(times, placement, found.cut.ends),
                1e-9);
    EXPECT_LE(found.cut.busiest, least * (1 + slack) + 1e-9);
    EXPECT_NEAR(squares(times, found.cut.ends), even, 1e-6);
    EXPECT_NEAR(busiest_rank(times, placement, found.cut.ends),
                found.cut.busiest, 1e-9);
    uneven += found.cut.busiest > least + 1e-9;
  }
  EXPECT_GT(uneven, 10);  // slack was of use
}

// Layers of which some select keys, as configs/mini.toml has them and
// tools/results/pipeline_h200_2026-11-30.jsonl has their times.
TEST(Balance, CutsAMeasuredModelAsOneDoesByHand) {
  const Layout parts = parse_layout("E|t|t|t|t|t|t|t|t|mL", "parts").value();
  const std::vector<double> times = {0.1, 6.8, 5.3, 5.3, 5.3,
                                     7.2, 5.3, 5.3, 5.3, 7.8};
  const BalancedCut loop = balanced_cut(times, loop_placement(2, 2), 0.01);
  EXPECT_EQ(layout_text(joined(parts, loop.cut.ends)), "Ettt|tt|tt|tmL");
  EXPECT_NEAR(loop.cut.busiest, 28.1, 1e-9);
}

// What it gives up on is a cut all the same.
TEST(Balance, ALargeModelHasACut) {
  const Random random(1, "balance");
  std::vector<double> times(95);
  double sum = 0, longest = 0;
  for (size_t i = 0; i < times.size(); ++i) {
    times[i] = 5 + 0.01 * static_cast<double>(random.below(100, i));
    sum += times[i];
    longest = std::max(longest, times[i]);
  }
  const std::vector<int> placement = loop_placement(8, 4);
  const BalancedCut found = balanced_cut(times, placement, 0.01);
  EXPECT_LE(found.least, sum / 8 + longest);
  EXPECT_LE(found.cut.busiest, found.least * 1.0101);
  EXPECT_NEAR(most(times, placement, found.cut.ends), found.cut.busiest, 1e-9);
  EXPECT_EQ(balanced_cut(times, placement, 0.01).cut.ends, found.cut.ends);
}

}  // namespace
}  // namespace tapeline
