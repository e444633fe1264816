// A run that was ended anywhere and resumed has the bits of one that was not.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/file.h"
#include "runtime/json.h"
#include "tests/cli/child.h"

namespace tapeline {
namespace {

using Words = std::vector<std::string>;

// Fields of time and of this process's memory.
const Words& volatile_keys() {
  static const Words& keys = *new Words{"time_unix", "tokens_per_s", "step_ms",
                                        "pool_peak_bytes", "rss_peak_bytes"};
  return keys;
}

// metrics.jsonl without those.
std::string lasting_metrics(const std::string& run) {
  const std::string text = read_file(run + "/metrics.jsonl").value();
  std::string out;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    Json json = parse_json(text.substr(begin, end - begin), "row").value();
    for (const std::string& key : volatile_keys()) json.erase(key);
    out += json.dump() + "\n";
    begin = end + 1;
  }
  return out;
}

// What must be equal at the end: metrics, samples, exported weights, the last
// snapshot.
std::map<std::string, std::string> outcome(const std::string& run) {
  std::map<std::string, std::string> out;
  out["metrics"] = lasting_metrics(run);
  for (const char* folder : {"samples", "hf"}) {
    for (auto& [path, bytes] : files_below(run + "/" + folder)) {
      out[path.substr(run.size())] = bytes;
    }
  }
  for (const char* file : {"rank00000.safetensors", "state.json"}) {
    const std::string name = std::string("/snapshots/step_0000006/") + file;
    out[name] = read_file(run + name).value();
  }
  return out;
}

class Resume : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    reference_folder_ = new TempFolder;
    const ChildResult r =
        tapeline_run({"train", "--config", small_config(*reference_folder_)});
    ASSERT_EQ(r.code, 0) << r.err;
    reference_ = new auto(outcome(*reference_folder_ / "runs/small"));
    ASSERT_GE(reference_->size(), 5u);
  }
  static void TearDownTestSuite() {
    delete reference_;
    delete reference_folder_;
  }
  void SetUp() override { config_ = small_config(folder_); }

  std::string run(const std::string& name = "") const {
    return folder_ / ("runs/small" + name);
  }
  Words words(const Words& more = {}) const {
    Words out = {"train", "--config", config_};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  void expect_same_outcome() const {
    const auto got = outcome(run());
    for (const auto& [name, bytes] : *reference_) {
      ASSERT_TRUE(got.contains(name)) << name;
      EXPECT_TRUE(got.at(name) == bytes) << name << " differs";
    }
    EXPECT_EQ(got.size(), reference_->size());
  }
  void finish() {
    ChildResult r = tapeline_run(words({"--resume"}));
    // Ended before its first snapshot: it begins again.
    if (r.code == 75) r = tapeline_run(words());
    EXPECT_EQ(r.code, 0) << r.err;
    EXPECT_EQ(r.err, "");
    expect_same_outcome();
    // Nothing stays of what a killed process was writing.
    for (const auto& [path, bytes] : files_below(run())) {
      EXPECT_EQ(path.find(".tmp-"), std::string::npos) << path;
      EXPECT_EQ(path.find(".old-"), std::string::npos) << path;
      EXPECT_EQ(path.find(".trash-"), std::string::npos) << path;
    }
  }

  static TempFolder* reference_folder_;
  static std::map<std::string, std::string>* reference_;
  TempFolder folder_;
  std::string config_;
};
TempFolder* Resume::reference_folder_;
std::map<std::string, std::string>* Resume::reference_;

ChildOptions fault(const std::string& text) {
  return {.environment = {{"TAPELINE_FAULT", text}},
          .folder = {},
          .before_exec = {}};
}

TEST_F(Resume, TwoRunsAreTheSame) {
  ASSERT_EQ(tapeline_run(words()).code, 0);
  expect_same_outcome();
}

// Calls spread over the whole run: snapshots, their retention, samples, the
// export. TAPELINE_KILL_STRIDE=1 tries every single one.
TEST_F(Resume, KilledAtACallThatChangesFiles) {
  const char* given = std::getenv("TAPELINE_KILL_STRIDE");
  const int stride = given != nullptr ? std::atoi(given) : 97;
  int killed = 0;
  for (int k = 1;; k += stride) {
    SCOPED_TRACE(k);
    ASSERT_TRUE(remove_path(folder_ / "runs").ok());
    const ChildResult r =
        tapeline_run(words(), fault("kill:" + std::to_string(k)));
    if (r.signal == 0) {
      EXPECT_EQ(r.code, 0) << r.err;
      break;
    }
    EXPECT_EQ(r.signal, SIGKILL);
    ++killed;
    finish();
  }
  EXPECT_GE(killed, 10);
}

TEST_F(Resume, KilledThreeTimes) {
  EXPECT_EQ(tapeline_run(words(), fault("kill:500")).signal, SIGKILL);
  EXPECT_EQ(tapeline_run(words({"--resume"}), fault("kill:29")).signal,
            SIGKILL);
  EXPECT_EQ(tapeline_run(words({"--resume"}), fault("kill:11")).signal,
            SIGKILL);
  finish();
}

// Waits until the run's metrics have so many lines.
void wait_for_rows(Child& child, const std::string& run, int64_t rows) {
  using std::chrono::steady_clock;
  const auto deadline = steady_clock::now() + std::chrono::seconds(60);
  while (child.running() && steady_clock::now() < deadline) {
    const auto text = read_file(run + "/metrics.jsonl");
    if (text.ok() && std::count(text->begin(), text->end(), '\n') >= rows) {
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST_F(Resume, KilledInTheMiddleOfAStep) {
  for (int rows : {1, 3, 5}) {
    SCOPED_TRACE(rows);
    ASSERT_TRUE(remove_path(folder_ / "runs").ok());
    Child child(words());
    wait_for_rows(child, run(), rows);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    child.send(SIGKILL);
    child.wait();
    finish();
  }
}

TEST_F(Resume, ASignalEndsTheStepSavesAndSaysHowToGoOn) {
  for (const auto& [signal, code, name] : {std::tuple{SIGTERM, 143, "SIGTERM"},
                                           std::tuple{SIGINT, 130, "SIGINT"}}) {
    SCOPED_TRACE(name);
    ASSERT_TRUE(remove_path(folder_ / "runs").ok());
    Child child(words());
    wait_for_rows(child, run(), 3);
    child.send(signal);
    const ChildResult r = child.wait();
    if (r.code != 0) {  // else it was through already
      EXPECT_EQ(r.code, code) << r.err;
      EXPECT_NE(r.err.find(std::string("stopped by ") + name + " after step "),
                std::string::npos)
          << r.err;
      EXPECT_NE(r.err.find("--config " + config_ + " --resume\n"),
                std::string::npos)
          << r.err;
    }
    finish();
  }
}

TEST_F(Resume, ASignalInTheEvaluationThatWasOwedSaysHowToGoOn) {
  ASSERT_EQ(tapeline_run(words()).code, 0);
  const std::string file = run("/metrics.jsonl");
  const std::string text = read_file(file).value();
  // Without the last evaluation, and with one that takes long.
  const size_t last = text.rfind('\n', text.size() - 2) + 1;
  ASSERT_NE(text.find("val_loss", last), std::string::npos);
  ASSERT_TRUE(write_file_atomic(file, text.substr(0, last)).ok());
  const std::string val = folder_.write("val.txt", sample_text(40000));
  Child child(words({"--resume", "--set", "data.val=\"" + val + "\""}));
  for (int i = 0; i < 6000 && child.running(); ++i) {
    if (child.out().find("training small") != std::string::npos) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  child.send(SIGTERM);
  const ChildResult r = child.wait();
  EXPECT_EQ(r.code, 143) << r.err;
  EXPECT_NE(r.err.find(" --resume\n"), std::string::npos) << r.err;
  EXPECT_EQ(read_file(file).value(), text.substr(0, last));
}

TEST_F(Resume, TheSecondSignalEndsAtOnce) {
  // Steps long enough that both signals come within one.
  Child child(words({"--set", "train.seq_len=2048", "--set",
                     "train.micro_batches=16", "--set", "data.val=\"\""}));
  wait_for_rows(child, run(), 1);
  // The row stands before the step is over: into the next one.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  child.send(SIGTERM);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  child.send(SIGTERM);
  const ChildResult r = child.wait();
  EXPECT_EQ(r.code, 143);
  EXPECT_EQ(r.err, "");
  EXPECT_FALSE(path_exists(run("/snapshots/step_0000001")));
}

TEST_F(Resume, FromANamedSnapshotLaterOnesAreSetAside) {
  ASSERT_EQ(tapeline_run(words()).code, 0);
  const ChildResult r =
      tapeline_run(words({"--resume=" + run("/snapshots/step_0000004")}));
  EXPECT_EQ(r.code, 0) << r.err;
  expect_same_outcome();
  EXPECT_TRUE(path_exists(run("/snapshots/step_0000006.superseded")));
}

TEST_F(Resume, AFinishedRunStaysAsItIs) {
  ASSERT_EQ(tapeline_run(words()).code, 0);
  finish();
}

TEST_F(Resume, MoreStepsGoOn) {
  ASSERT_EQ(tapeline_run(words({"--set", "train.steps=4"})).code, 0);
  const ChildResult r = tapeline_run(words({"--resume"}));
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(lasting_metrics(run()), reference_->at("metrics"));
  // A constant rate has no plan that this could change.
  EXPECT_EQ(r.out.find("learning rates"), std::string::npos) << r.out;
}

TEST_F(Resume, AChangedScheduleIsSaid) {
  const Words linear = {"--set", "schedule.name=linear"};
  Words shorter = linear;
  shorter.insert(shorter.end(), {"--set", "train.steps=4"});
  ASSERT_EQ(tapeline_run(words(shorter)).code, 0);
  Words resumed = linear;
  resumed.push_back("--resume");
  const ChildResult r = tapeline_run(words(resumed));
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_NE(r.out.find("the learning rates are those of the config"),
            std::string::npos)
      << r.out;
}

TEST_F(Resume, TwoProcessesDoNotShareAFolder) {
  Child child(words({"--set", "train.steps=500"}));
  wait_for_rows(child, run(), 1);
  for (const char* more : {"--resume", "--threads=1"}) {
    const ChildResult r = tapeline_run(words({more}));
    EXPECT_EQ(r.code, 2) << r.err;
    EXPECT_NE(r.err.find("another process trains in this folder"),
              std::string::npos)
        << r.err;
  }
}

}  // namespace
}  // namespace tapeline
