#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/cuda_monitor.h"
#include "runtime/json.h"

namespace tapeline {
namespace {

CudaReport report() {
  CudaReport r;
  r.synchronizations = 1;
  r.calls["cudaStreamSynchronize"] = 1;
  r.activities = {{"gemm", 1000, 4000, 7, 0},
                  {"copy to host", 2000, 6000, 9, 64},
                  {"norm", 7000, 8000, 7, 0, {132, 2, 1}, {256, 1, 1}},
                  {"gemm", 8000, 10000, 7, 0}};
  return r;
}

TEST(CudaReport, TotalsAreByNameTheLongestFirst) {
  const std::vector<CudaTotal> all = largest(report(), 10);
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].name, "gemm");
  EXPECT_EQ(all[0].calls, 2);
  EXPECT_DOUBLE_EQ(all[0].us, 5);
  EXPECT_EQ(all[1].name, "copy to host");
  EXPECT_EQ(all[2].name, "norm");
  EXPECT_EQ(largest(report(), 1).size(), 1u);
}

// Work on two streams at once is busy time once.
TEST(CudaReport, JsonHasCountsAndTheTimeThatTheDeviceIsBusy) {
  const Json json = to_json(report());
  EXPECT_EQ(json.find("synchronizations")->integer(), 1);
  EXPECT_EQ(json.find("allocations")->integer(), 0);
  EXPECT_EQ(json.find("calls")->find("cudaStreamSynchronize")->integer(), 1);
  EXPECT_DOUBLE_EQ(json.find("span_us")->number(), 9);
  EXPECT_DOUBLE_EQ(json.find("busy_us")->number(), 8);
  EXPECT_EQ(json.find("largest")->array().size(), 3u);
}

TEST(CudaReport, TraceHasARowForEachStreamAndTimesFromItsBeginning) {
  const Json json = parse_json(chrome_trace(report()), "trace", 16).value();
  const Json::Array& events = json.find("traceEvents")->array();
  ASSERT_EQ(events.size(), 2u + 4u);
  EXPECT_EQ(events[0].find("args")->find("name")->string(), "stream 7");
  EXPECT_EQ(events[3].find("name")->string(), "copy to host");
  EXPECT_DOUBLE_EQ(events[3].find("ts")->number(), 1);
  EXPECT_DOUBLE_EQ(events[3].find("dur")->number(), 4);
  EXPECT_EQ(events[3].find("args")->find("bytes")->integer(), 64);
  EXPECT_EQ(events[3].find("args")->find("grid"), nullptr);
  EXPECT_EQ(events[2].find("args"), nullptr);
  EXPECT_EQ(events[4].find("args")->find("grid")->dump(), "[132, 2, 1]");
  EXPECT_EQ(events[4].find("args")->find("block")->dump(), "[256, 1, 1]");
}

TEST(CudaReport, NothingIsNothing) {
  EXPECT_TRUE(largest({}, 10).empty());
  EXPECT_EQ(to_json(CudaReport()).find("span_us")->number(), 0);
}

}  // namespace
}  // namespace tapeline
