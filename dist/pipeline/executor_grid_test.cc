// Every generator under threads gives the bits of a plain loop.
//
// Shards split the sizes. Capacity, delays and the order of arrival vary with
// the case, so that all are met.
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dist/pipeline/generators.h"
#include "dist/pipeline/memory.h"
#include "dist/pipeline/operations.h"
#include "dist/pipeline/testing/micro_model.h"
#include "dist/pipeline/validator.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

constexpr int kMostRanks = 4, kMostChunks = 3, kMostMicroBatches = 13;

class Grid : public testing::TestWithParam<std::string> {};

TEST_P(Grid, HasTheBitsOfThePlainLoop) {
  const std::string& name = GetParam();
  int64_t cases = 0, messages = 0, actions = 0, by_capacity[3] = {0, 0, 0};
  for (int p = 1; p <= kMostRanks; ++p) {
    for (int v = 1; v <= kMostChunks; ++v) {
      for (int m = 1; m <= kMostMicroBatches; ++m) {
        const auto made = make_schedule(name, {p, v, m});
        if (!made.ok()) continue;
        const Schedule schedule = with_tied_ends(*made);
        SCOPED_TRACE(absl::StrCat("p ", p, " v ", v, " m ", m));
        const int64_t number = cases++;
        MicroOptions options;
        options.threads.seed = static_cast<uint64_t>(number);
        options.threads.order = static_cast<ArrivalOrder>(number % 3);
        if (number % 4 == 0) {
          options.threads.max_delay = absl::Microseconds(50);
        }
        // The least that the validator allows, one more, or no bound.
        const int kind = static_cast<int>(number % 3);
        const std::optional<int> least =
            min_capacity(schedule, OvRelease::kEarly);
        ASSERT_TRUE(least.has_value());
        if (kind < 2) options.threads.capacity = *least + kind;
        ++by_capacity[kind];

        const MicroResult want = micro_loop(schedule.stages(), m, options);
        const MicroResult got = micro_pipeline(schedule, options);
        ASSERT_EQ(difference(got, want), "");

        // It took the schedule's path.
        const std::vector<int> sent = messages_sent(schedule);
        const std::vector<Peak> kept = peaks(schedule, {Holds{}});
        int64_t received = 0, total = 0;
        for (int r = 0; r < p; ++r) {
          const ExecutorCounters& c = got.counters[r];
          int64_t passes = 0;
          for (const Action& action : schedule.ranks[r]) {
            passes += static_cast<int64_t>(action.passes().size());
          }
          EXPECT_EQ(c.actions(), passes);
          EXPECT_EQ(c.sent, sent[r]);
          EXPECT_EQ(c.nodes_left, 0);
          EXPECT_EQ(static_cast<double>(c.most_kept), kept[r].value);
          EXPECT_EQ(got.stages_begun_not_ended[r], 0);
          EXPECT_EQ(got.live_after[r], 0);
          received += c.received;
          total += c.sent;
          actions += passes;
        }
        EXPECT_EQ(received, total);
        EXPECT_EQ(got.forwards, int64_t{schedule.stages()} * m);
        messages += total;
      }
    }
  }
  // p 1: no messages; some names have one number of chunks.
  EXPECT_GE(cases, name == "dualpipev" ? 36 : 52);
  EXPECT_GT(messages, cases);
  for (const int64_t n : by_capacity) EXPECT_GT(n, 0);
  RecordProperty("cases", static_cast<int>(cases));
  std::cout << name << ": " << cases << " cases, " << actions << " passes, "
            << messages << " messages\n";
}

INSTANTIATE_TEST_SUITE_P(Names, Grid, testing::ValuesIn(schedule_names()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace tapeline
