#include "dist/snapshot.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/fault.h"
#include "runtime/file.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

class SnapshotTest : public testing::Test {
 protected:
  void SetUp() override {
    // In memory where there is such a folder: a sweep makes thousands of
    // fsyncs.
    std::string root =
        access("/dev/shm", W_OK) == 0 ? "/dev/shm" : testing::TempDir();
    root += "/snapshot-XXXXXX";
    ASSERT_NE(mkdtemp(root.data()), nullptr);
    store_.root = root + "/snapshots";
  }
  void TearDown() override {
    set_fault("");
    ASSERT_TRUE(remove_path(parent_path(store_.root)).ok());
  }

  // Contents that tell steps apart.
  SnapshotContents contents(int64_t step) {
    weights_ = {static_cast<float>(step), 1, 2, 3};
    counts_ = {step, -step};
    SnapshotContents c;
    c.step = step;
    c.layout["ranks"] = 1;
    c.state["tokens"] = 100 * step;
    c.tensors = {{"m",
                  DType::kF32,
                  {2, 2},
                  reinterpret_cast<const std::byte*>(weights_.data())},
                 {"counts",
                  DType::kI64,
                  {2},
                  reinterpret_cast<const std::byte*>(counts_.data())}};
    c.texts["config.resolved.toml"] = "[train]\nsteps = 5\n";
    return c;
  }
  absl::Status save(int64_t step) {
    return save_snapshot(store_, contents(step), &warnings_).status();
  }
  std::string path(int64_t step) const {
    return join_path(store_.root, snapshot_name(step));
  }
  std::vector<std::string> names() const {
    return list_directory(store_.root).value();
  }
  int64_t latest_step() {
    rejected_.clear();
    const auto snapshot = load_latest_snapshot(store_.root, &rejected_);
    return snapshot.ok() ? snapshot->step : -1;
  }
  void overwrite(const std::string& file, const std::string& text) {
    ASSERT_TRUE(write_file_atomic(file, text).ok());
  }

  SnapshotStore store_;
  std::vector<float> weights_;
  std::vector<int64_t> counts_;
  std::vector<std::string> warnings_, rejected_;
};

TEST_F(SnapshotTest, ReadsBackWhatWasSaved) {
  ASSERT_TRUE(save(120).ok());
  EXPECT_EQ(names(), (std::vector<std::string>{"LATEST", "step_0000120"}));
  EXPECT_EQ(read_file(store_.root + "/LATEST").value(), "step_0000120\n");
  const auto snapshot = load_latest_snapshot(store_.root, &rejected_);
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  EXPECT_EQ(snapshot->step, 120);
  EXPECT_EQ(snapshot->state.find("tokens")->integer(), 12000);
  EXPECT_EQ(snapshot->layout.find("ranks")->integer(), 1);
  const Tensor m = snapshot->tensors->read_tensor("m").value();
  EXPECT_EQ(m.shape(), (Shape{2, 2}));
  EXPECT_EQ(m.to_vector<float>(), (std::vector<float>{120, 1, 2, 3}));
  EXPECT_EQ(
      snapshot->tensors->read_tensor("counts").value().to_vector<int64_t>(),
      (std::vector<int64_t>{120, -120}));
  EXPECT_TRUE(path_exists(path(120) + "/config.resolved.toml"));
}

TEST_F(SnapshotTest, KeepsTheNewestAndNeverFewerThanTwo) {
  store_.keep = 1;
  for (int64_t step : {1, 2, 10, 11}) ASSERT_TRUE(save(step).ok());
  EXPECT_EQ(names(), (std::vector<std::string>{"LATEST", "step_0000010",
                                               "step_0000011"}));
  store_.keep = 3;
  ASSERT_TRUE(save(12).ok());
  EXPECT_EQ(names().size(), 4u);
}

TEST_F(SnapshotTest, ADamagedSnapshotDoesNotCountAsKept) {
  for (int64_t step : {1, 2}) ASSERT_TRUE(save(step).ok());
  ASSERT_TRUE(remove_path(path(2) + "/MANIFEST.json").ok());
  ASSERT_TRUE(save(3).ok());
  EXPECT_TRUE(path_exists(path(1)));
  EXPECT_TRUE(path_exists(path(2)));
}

// Every byte of every file, one bit each: thousands of damaged snapshots.
TEST_F(SnapshotTest, FindsEveryFlippedByte) {
  ASSERT_TRUE(save(1).ok());
  ASSERT_TRUE(save(2).ok());
  for (const char* name : {"rank00000.safetensors", "state.json",
                           "config.resolved.toml", "MANIFEST.json"}) {
    const std::string file = path(2) + "/" + name;
    const std::string good = read_file(file).value();
    // In place and without fsync: thousands of durable writes take too long.
    FILE* out = fopen(file.c_str(), "r+b");
    setbuf(out, nullptr);
    for (size_t i = 0; i < good.size(); ++i) {
      fseek(out, static_cast<long>(i), SEEK_SET);
      fputc(good[i] ^ (1 << (i % 8)), out);
      const auto snapshot = load_snapshot(path(2));
      ASSERT_FALSE(snapshot.ok()) << name << " byte " << i;
      ASSERT_TRUE(absl::IsDataLoss(snapshot.status())) << snapshot.status();
      ASSERT_NE(snapshot.status().message().find(name), std::string::npos)
          << snapshot.status();
      fseek(out, static_cast<long>(i), SEEK_SET);
      fputc(good[i], out);
    }
    fclose(out);
    ASSERT_TRUE(load_snapshot(path(2)).ok());
  }
}

TEST_F(SnapshotTest, FallsBackToAnOlderOneAndSaysWhichFile) {
  const std::string tensors = "/rank00000.safetensors";
  for (const char* damage : {"cut", "extended", "missing", "swapped"}) {
    SCOPED_TRACE(damage);
    for (int64_t step : {1, 2}) ASSERT_TRUE(save(step).ok());
    const std::string good = read_file(path(2) + tensors).value();
    if (damage == std::string("cut")) {
      overwrite(path(2) + tensors, good.substr(0, good.size() - 1));
    } else if (damage == std::string("extended")) {
      overwrite(path(2) + tensors, good + '\0');
    } else if (damage == std::string("swapped")) {
      overwrite(path(2) + tensors, read_file(path(1) + tensors).value());
    } else {
      ASSERT_TRUE(remove_path(path(2) + tensors).ok());
    }
    EXPECT_EQ(latest_step(), 1);
    ASSERT_EQ(rejected_.size(), 1u);
    EXPECT_NE(rejected_[0].find("step_0000002/rank00000.safetensors"),
              std::string::npos)
        << rejected_[0];
    // Named explicitly, it is refused instead.
    EXPECT_TRUE(absl::IsDataLoss(load_snapshot(path(2)).status()));
    ASSERT_TRUE(remove_path(store_.root).ok());
  }
}

TEST_F(SnapshotTest, SaysWhenNoneIsUsable) {
  EXPECT_TRUE(
      absl::IsNotFound(load_latest_snapshot(store_.root, &rejected_).status()));
  ASSERT_TRUE(save(3).ok());
  ASSERT_TRUE(remove_path(path(3) + "/MANIFEST.json").ok());
  const auto none = load_latest_snapshot(store_.root, &rejected_);
  EXPECT_TRUE(absl::IsDataLoss(none.status()));
  EXPECT_NE(none.status().message().find("MANIFEST.json is missing"),
            std::string::npos)
      << none.status();
  EXPECT_TRUE(absl::IsNotFound(load_snapshot(path(4)).status()));
}

TEST_F(SnapshotTest, AFolderThatCannotBeListedIsNotAnEmptyOne) {
  ASSERT_TRUE(make_directories(parent_path(store_.root)).ok());
  overwrite(store_.root, "a file");
  const absl::Status status =
      load_latest_snapshot(store_.root, &rejected_).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
}

TEST_F(SnapshotTest, AFolderUnderAnotherStepsNameIsRefused) {
  ASSERT_TRUE(save(3).ok());
  ASSERT_TRUE(rename_path(path(3), path(4)).ok());
  EXPECT_EQ(load_snapshot(path(4)).status().message(),
            path(4) + " holds step 3; the folder was renamed or mixed up");
}

TEST_F(SnapshotTest, AValidStepIsNeverOverwritten) {
  ASSERT_TRUE(save(5).ok());
  const std::string before = read_file(path(5) + "/MANIFEST.json").value();
  SnapshotContents other = contents(5);
  weights_[0] = -1;
  ASSERT_TRUE(save_snapshot(store_, other, &warnings_).ok());
  EXPECT_EQ(read_file(path(5) + "/MANIFEST.json").value(), before);
}

TEST_F(SnapshotTest, ADamagedStepIsSetAsideAndSavedAgain) {
  ASSERT_TRUE(save(5).ok());
  overwrite(path(5) + "/state.json", "{}");
  ASSERT_TRUE(save(5).ok());
  EXPECT_EQ(latest_step(), 5);
  EXPECT_EQ(names(), (std::vector<std::string>{"LATEST", "step_0000005",
                                               "step_0000005.damaged"}));
}

TEST_F(SnapshotTest, LaterSnapshotsAreSetAsideNotLost) {
  for (int64_t step : {1, 2}) ASSERT_TRUE(save(step).ok());
  ASSERT_TRUE(set_aside_later_snapshots(store_.root, 1).ok());
  EXPECT_EQ(latest_step(), 1);
  ASSERT_TRUE(save(2).ok());
  ASSERT_TRUE(set_aside_later_snapshots(store_.root, 1).ok());
  EXPECT_EQ(names(), (std::vector<std::string>{"LATEST", "step_0000001",
                                               "step_0000002.superseded",
                                               "step_0000002.superseded-2"}));
}

TEST_F(SnapshotTest, NamesTheMissingSpace) {
  const absl::Status short_of =
      check_disk_space(testing::TempDir(), uint64_t{1} << 60, 3);
  EXPECT_TRUE(absl::IsResourceExhausted(short_of));
  EXPECT_NE(short_of.message().find("3 snapshots need 3463"), std::string::npos)
      << short_of;
}

// Runs save(2) in a child process with the fault; returns its wait status.
template <class F>
int in_child(F&& f) {
  const pid_t child = fork();
  if (child == 0) {
    f();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

TEST_F(SnapshotTest, KilledAtAnyCallTheOldOrTheNewSnapshotIsThere) {
  store_.keep = 2;
  int killed = 0;
  for (int k = 1;; ++k) {
    SCOPED_TRACE(k);
    ASSERT_TRUE(remove_path(store_.root).ok());
    for (int64_t step : {1, 2}) ASSERT_TRUE(save(step).ok());
    const int status = in_child([&] {
      set_fault("kill:" + std::to_string(k));
      (void)save(3);
    });
    const int64_t latest = latest_step();
    EXPECT_TRUE(latest == 2 || latest == 3) << latest;
    EXPECT_TRUE(rejected_.empty()) << rejected_[0];
    // What the crash left does not disturb the next save.
    ASSERT_TRUE(save(4).ok());
    EXPECT_EQ(latest_step(), 4);
    for (const std::string& name : names()) {
      EXPECT_TRUE(name == "LATEST" || name.size() == 12) << name;
    }
    if (!WIFSIGNALED(status)) {
      EXPECT_EQ(latest, 3);
      break;
    }
    ++killed;
  }
  EXPECT_GE(killed, 20);
}

TEST_F(SnapshotTest, AnErrorOfAnyCallLeavesTheOldSnapshotAndIsReported) {
  for (const char* kind : {"eio", "enospc"}) {
    for (const char* onwards : {"", "+"}) {
      int failed = 0;
      for (int k = 1;; ++k) {
        SCOPED_TRACE(std::string(kind) + ":" + std::to_string(k) + onwards);
        ASSERT_TRUE(remove_path(store_.root).ok());
        warnings_.clear();
        for (int64_t step : {1, 2}) ASSERT_TRUE(save(step).ok());
        set_fault(std::string(kind) + ":" + std::to_string(k) + onwards);
        const absl::Status status = save(3);
        const int64_t points = fault_points();
        set_fault("");
        const int64_t latest = latest_step();
        if (!status.ok()) ++failed;
        EXPECT_EQ(latest_step(), latest);
        EXPECT_TRUE(latest == 3 || (!status.ok() && latest == 2)) << latest;
        ASSERT_TRUE(save(4).ok());
        EXPECT_EQ(latest_step(), 4);
        if (points < k) break;
        // After the commit only retention can fail, which is a warning.
        EXPECT_TRUE(!status.ok() || !warnings_.empty());
      }
      EXPECT_GE(failed, 20);
    }
  }
}

TEST_F(SnapshotTest, InterruptedAndShortCallsChangeNothing) {
  ASSERT_TRUE(save(1).ok());
  const std::string good = read_file(path(1) + "/MANIFEST.json").value();
  for (const char* fault : {"short:1+", "eintr:1", "eintr:7"}) {
    ASSERT_TRUE(remove_path(store_.root).ok());
    set_fault(fault);
    ASSERT_TRUE(save(1).ok()) << fault;
    set_fault("");
    EXPECT_EQ(read_file(path(1) + "/MANIFEST.json").value(), good);
  }
}

// Parts of three ranks, one of which has nothing.
class SnapshotParts : public SnapshotTest {
 protected:
  absl::Status save_parts(int64_t step) {
    SnapshotContents c = contents(step);
    const std::vector<NamedBytes> all = c.tensors;
    c.tensors.clear();
    ASSIGN_OR_RETURN(const std::string folder,
                     begin_snapshot(store_, step, /*bytes=*/1000));
    if (folder.empty()) return absl::OkStatus();
    std::vector<std::string> parts;
    for (const std::vector<NamedBytes>& tensors :
         {std::vector<NamedBytes>{all[0]}, {}, {all[1]}}) {
      ASSIGN_OR_RETURN(
          parts.emplace_back(),
          write_snapshot_part(folder, static_cast<int>(parts.size()), tensors));
    }
    return end_snapshot(store_, folder, c, parts, &warnings_).status();
  }
};

TEST_F(SnapshotParts, B41_HaveTheTensorsOfOneFileUnderTheSameNames) {
  ASSERT_TRUE(save(1).ok());
  const Snapshot whole = load_snapshot(path(1)).value();
  ASSERT_TRUE(remove_path(store_.root).ok());
  ASSERT_TRUE(save_parts(1).ok());
  const Snapshot parts = load_snapshot(path(1)).value();
  EXPECT_EQ(parts.tensors->names(), whole.tensors->names());
  EXPECT_EQ(parts.state, whole.state);
  EXPECT_EQ(parts.tensors->read_tensor("m")->to_vector<float>(), weights_);
  EXPECT_EQ(parts.tensors->read_tensor("counts")->to_vector<int64_t>(),
            counts_);
  EXPECT_TRUE(path_exists(path(1) + "/rank00002.safetensors"));
  // A step that is there is not written again.
  EXPECT_EQ(begin_snapshot(store_, 1, 1000).value(), "");
}

TEST_F(SnapshotParts, AnyDamagedFileIsFound) {
  for (const char* file :
       {"rank00000.safetensors", "rank00001.safetensors",
        "rank00002.safetensors", "tensors.index.json", "state.json"}) {
    ASSERT_TRUE(remove_path(store_.root).ok());
    ASSERT_TRUE(save_parts(1).ok());
    std::string bytes = read_file(path(1) + "/" + file).value();
    bytes.back() ^= 1;
    ASSERT_TRUE(write_file_atomic(path(1) + "/" + file, bytes).ok());
    const absl::Status status = load_snapshot(path(1)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_NE(status.message().find(file), std::string::npos) << status;
  }
}

TEST_F(SnapshotParts, AFailureOfAnyCallLeavesTheOldSnapshot) {
  int failed = 0;
  for (int k = 1;; ++k) {
    SCOPED_TRACE(k);
    ASSERT_TRUE(remove_path(store_.root).ok());
    for (int64_t step : {1, 2}) ASSERT_TRUE(save_parts(step).ok());
    set_fault("eio:" + std::to_string(k));
    const absl::Status status = save_parts(3);
    const int64_t points = fault_points();
    set_fault("");
    if (!status.ok()) ++failed;
    const int64_t latest = latest_step();
    EXPECT_TRUE(latest == 3 || (!status.ok() && latest == 2)) << latest;
    ASSERT_TRUE(save_parts(4).ok());
    EXPECT_EQ(latest_step(), 4);
    if (points < k) break;
  }
  EXPECT_GE(failed, 20);
}

}  // namespace
}  // namespace tapeline
