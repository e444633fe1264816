#include "tools/train/metrics.h"

#include <cmath>
#include <string>

#include "gtest/gtest.h"
#include "runtime/file.h"

namespace tapeline {
namespace {

StepRecord record() {
  StepRecord r;
  r.step = 7;
  r.loss = 3.41274;
  r.lr = 3e-4;
  r.grad_norm = 0.8412;
  r.tokens_per_s = 1532.4;
  r.step_ms = 668.2;
  r.pool_peak_bytes = 52 << 20;
  r.rss_peak_bytes = 104 << 20;
  return r;
}

TEST(StepLine, HasEveryColumn) {
  EXPECT_EQ(
      step_line(record(), 2000, 3725),
      "step    7/2000 | loss  3.4127 | lr 3.00e-04 | gnorm  0.841 |  1532 "
      "tok/s |   668 ms | mem   52/104 MiB | ETA 01:02:05 | skip 0");
}

TEST(StepLine, ColumnsStayAligned) {
  StepRecord big = record();
  big.step = 1999;
  big.loss = 12.5;
  big.grad_norm = 31.02;
  big.tokens_per_s = 41234;
  big.step_ms = 5.2;
  const std::string a = step_line(record(), 2000, 60);
  const std::string b = step_line(big, 2000, 60);
  EXPECT_EQ(a.size(), b.size()) << a << "\n" << b;
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i] == '|', b[i] == '|') << a << "\n" << b;
  }
}

TEST(Metrics, NumbersThatJsonLacksAreNull) {
  StepRecord r = record();
  r.loss = NAN;
  r.grad_norm = INFINITY;
  const Json json = parse_json(to_json(r).dump(), "row").value();
  EXPECT_TRUE(json.find("loss")->is_null());
  EXPECT_TRUE(json.find("grad_norm")->is_null());
}

class ReadMetrics : public testing::Test {
 protected:
  void write(const std::string& text) {
    ASSERT_TRUE(write_file_atomic(path_, text).ok());
  }
  std::string path_ = testing::TempDir() + "/metrics.jsonl";
};

TEST_F(ReadMetrics, LaterLinesAndAHalfLineGo) {
  const std::string two =
      "{\"step\": 1}\n{\"step\": 2}\n{\"step\": 2, \"val_loss\": 1.0}\n";
  write(two + "{\"step\": 3}\n{\"ste");
  MetricsCut cut = read_metrics(path_, 2).value();
  EXPECT_EQ(cut.kept, two);
  EXPECT_TRUE(cut.cuts);
  EXPECT_TRUE(cut.evaluated);
  cut = read_metrics(path_, 1).value();
  EXPECT_EQ(cut.kept, "{\"step\": 1}\n");
  EXPECT_FALSE(cut.evaluated);
  write(two);
  EXPECT_FALSE(read_metrics(path_, 2).value().cuts);
}

TEST_F(ReadMetrics, AbsentIsFine) {
  const MetricsCut cut = read_metrics(path_ + ".absent", 2).value();
  EXPECT_FALSE(cut.cuts);
  EXPECT_FALSE(cut.evaluated);
}

TEST_F(ReadMetrics, ABadTailIsCutAndABadLineElsewhereAnError) {
  write("{\"step\": 1}\n{\"step\": 1, \"va\n" + std::string(9, '\0') + "\n");
  EXPECT_EQ(read_metrics(path_, 1).value().kept, "{\"step\": 1}\n");
  write("{\"step\": 1}\nnot ours\n{\"step\": 2}\n");
  const absl::Status status = read_metrics(path_, 1).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_NE(status.message().find("not ours"), std::string::npos) << status;
}

TEST(PeakResident, IsAtLeastWhatIsInUse) {
  EXPECT_GT(peak_resident_bytes(), 1 << 20);
}

}  // namespace
}  // namespace tapeline
