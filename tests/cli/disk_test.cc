// Damaged snapshots and failing disks: the documented code, and nothing that
// was on disk is lost.
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <functional>
#include <string>

#include "gtest/gtest.h"
#include "runtime/file.h"
#include "tests/cli/child.h"
#include "tests/cli/expect.h"

namespace tapeline {
namespace {

// --- Snapshots

class Snapshots : public testing::Test {
 protected:
  void SetUp() override {
    config_ = small_config(folder_);
    ASSERT_EQ(tapeline_run({"train", "--config", config_}).code, 0);
    last_ = folder_ / "runs/small/snapshots/step_0000006";
    earlier_ = folder_ / "runs/small/snapshots/step_0000004";
  }
  ChildResult resume(const Words& more = {}) {
    return tapeline_run(Words{"train", "--config", config_} +
                        (more.empty() ? Words{"--resume"} : more));
  }
  void damage(const std::string& snapshot, const std::string& how) {
    const std::string file = snapshot + "/rank00000.safetensors";
    if (how == "missing manifest") {
      ASSERT_TRUE(remove_path(snapshot + "/MANIFEST.json").ok());
      return;
    }
    std::string bytes = read_file(file).value();
    if (how == "flipped bit") bytes[bytes.size() / 2] ^= 4;
    if (how == "cut") bytes.resize(bytes.size() - 1);
    ASSERT_TRUE(write_file_atomic(file, bytes).ok());
  }

  TempFolder folder_;
  std::string config_, last_, earlier_;
};

TEST_F(Snapshots, ADamagedOneIsNamedAndTheOlderUsed) {
  for (const char* how : {"flipped bit", "cut", "missing manifest"}) {
    SCOPED_TRACE(how);
    damage(last_, how);
    const ChildResult r = resume();
    EXPECT_EQ(r.code, 0) << r.err;
    EXPECT_NE(r.out.find("snapshot " + last_ + " is not usable"),
              std::string::npos)
        << r.out;
    EXPECT_NE(r.out.find("resumed from " + earlier_), std::string::npos);
  }
}

TEST_F(Snapshots, WithoutAUsableOneTheCodeIs75) {
  for (const char* how : {"flipped bit", "cut", "missing manifest"}) {
    SCOPED_TRACE(how);
    damage(last_, how);
    damage(earlier_, how);
    const auto before = files_below(folder_.path());
    expect_failure(resume(), 75, {"no usable snapshot", "step_0000006"});
    EXPECT_EQ(files_below(folder_.path()), before);
  }
}

TEST_F(Snapshots, ANamedOneIsUsedOrRefused) {
  damage(last_, "flipped bit");
  const auto before = files_below(folder_.path());
  expect_failure(resume({"--resume=" + last_}), 75,
                 {last_ + "/rank00000.safetensors"});
  expect_failure(resume({"--resume=" + folder_ / "nowhere"}), 2,
                 {"nowhere", "no snapshot folder"});
  EXPECT_EQ(files_below(folder_.path()), before);
}

TEST_F(Snapshots, OneOfAnotherRunIsRefused) {
  const auto before = files_below(folder_.path());
  const struct {
    const char* set;
    Words parts;
  } cases[] = {
      {"model.intermediate_size=40",
       {"model.intermediate_size is 40, but 48 in " + last_}},
      {"seed=4", {"seed is 4, but 3 in " + last_}},
      {"train.seq_len=32", {"train.seq_len is 32, but 64 in "}},
      {"train.micro_batches=1", {"train.micro_batches is 1, but 2 in "}},
      {"data.train=king_james:train",
       {"data.train is \"king_james:train\", but ", "text.txt"}},
      {"train.steps=5", {"train.steps is 5, but ", "step_0000006 is past it"}},
  };
  for (const auto& c : cases) {
    expect_failure(resume({"--resume", "--set", c.set}), 2, c.parts);
    EXPECT_EQ(files_below(folder_.path()), before) << c.set;
  }
}

TEST_F(Snapshots, WithoutAnyTheCodeIs75AndNothingChanges) {
  ASSERT_TRUE(remove_path(folder_ / "runs/small/snapshots").ok());
  const auto before = files_below(folder_.path());
  expect_failure(resume(), 75, {"no snapshot", "without --resume"});
  EXPECT_EQ(files_below(folder_.path()), before);
  ASSERT_TRUE(remove_path(folder_ / "runs").ok());
  expect_failure(resume(), 75, {"is no run", "without --resume"});
  EXPECT_FALSE(path_exists(folder_ / "runs"));
}

TEST_F(Snapshots, OnesThatCannotBeListedEndWith74) {
  ASSERT_TRUE(remove_path(folder_ / "runs/small/snapshots").ok());
  folder_.write("runs/small/snapshots", "a file");
  const auto before = files_below(folder_.path());
  expect_failure(resume(), 74, {"runs/small/snapshots"});
  EXPECT_EQ(files_below(folder_.path()), before);
}

TEST_F(Snapshots, DamagedMetricsAreCutAtTheEndAndRefusedElsewhere) {
  const std::string file = folder_ / "runs/small/metrics.jsonl";
  const std::string good = read_file(file).value();
  ASSERT_TRUE(
      write_file_atomic(file, good + std::string(50, '\0') + "\n{\"st").ok());
  EXPECT_EQ(resume().code, 0);
  EXPECT_EQ(read_file(file).value(), good);
  ASSERT_TRUE(write_file_atomic(file, "not ours\n" + good).ok());
  const auto before = files_below(folder_.path());
  expect_failure(resume(), 2, {"metrics.jsonl", "not ours"});
  EXPECT_EQ(files_below(folder_.path()), before);
}

// --- Disk

// A file system of `options` over `folder`, in the child alone. False: not
// permitted here.
bool mount_over(const std::string& folder, unsigned long flags,
                const std::string& options) {
  return unshare(CLONE_NEWNS) == 0 &&
         mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("none", folder.c_str(), "tmpfs", flags, options.c_str()) == 0;
}

class Disk : public testing::Test {
 protected:
  void SetUp() override {
    config_ = small_config(folder_);
    ASSERT_TRUE(make_directories(folder_ / "runs").ok());
  }
  ChildResult train(std::function<void()> before_exec, const Words& more = {}) {
    return tapeline_run(Words{"train", "--config", config_} + more,
                        {.environment = {},
                         .folder = {},
                         .before_exec = std::move(before_exec)});
  }
  void limit_files(rlim_t bytes) {
    const rlimit limit = {bytes, bytes};
    setrlimit(RLIMIT_FSIZE, &limit);
  }

  TempFolder folder_;
  std::string config_;
};

TEST_F(Disk, AFullOneEndsWith74BeforeTheFirstStep) {
  const std::string runs = folder_ / "runs";
  const ChildResult r = train([&] {
    // Where mounting is not permitted, files that may not grow stand in.
    if (!mount_over(runs, 0, "size=600k")) limit_files(300 << 10);
  });
  expect_failure(r, 74, {runs});
}

TEST_F(Disk, OneThatFillsUpKeepsTheEarlierSnapshot) {
  ASSERT_EQ(train({}, {"--set", "train.steps=2"}).code, 0);
  const auto snapshot = files_below(folder_ / "runs/small/snapshots");
  ASSERT_GE(snapshot.size(), 5u);
  // The tensors of a snapshot do not fit into a file of 100 KiB.
  const ChildResult r = train([&] { limit_files(100 << 10); }, {"--resume"});
  expect_failure(r, 74, {"rank00000.safetensors", "File too large"});
  EXPECT_EQ(files_below(folder_ / "runs/small/snapshots"), snapshot);
  EXPECT_EQ(train({}, {"--resume"}).code, 0);
}

TEST_F(Disk, MetricsThatDoNotFitEndWith74) {
  const ChildResult r =
      train([&] { limit_files(8 << 10); },
            {"--set", "train.steps=40", "--set", "train.snapshot_every=0"});
  expect_failure(r, 74, {"metrics.jsonl", "File too large"});
}

TEST_F(Disk, ErrorsOfAnyWriteEndWith74) {
  for (const char* fault : {"enospc:1+", "eio:20+", "enospc:40+"}) {
    SCOPED_TRACE(fault);
    const ChildResult r =
        tapeline_run({"train", "--config", config_},
                     {.environment = {{"TAPELINE_FAULT", fault}},
                      .folder = {},
                      .before_exec = {}});
    expect_failure(r, 74, {"runs/small"});
  }
}

TEST_F(Disk, AReadOnlyFolderEndsWith74) {
  const std::string runs = folder_ / "runs";
  bool mounted = geteuid() == 0;
  const ChildResult r = train(
      [&] {
        if (geteuid() != 0) {
          chmod(runs.c_str(), 0500);
        } else if (!mount_over(runs, MS_RDONLY, "")) {
          _exit(99);
        }
      },
      {});
  if (mounted && r.code == 99) {
    // Root without the right to mount: a path that nobody can make.
    expect_failure(train({}, {"--set", "run.dir=/proc/runs"}), 74, {"/proc"});
    return;
  }
  expect_failure(r, 74, {runs});
}

TEST_F(Disk, AFileInTheWayEndsWith74) {
  folder_.write("file", "");
  expect_failure(train({}, {"--set", "run.dir=\"" + folder_ / "file" + "\""}),
                 74, {"file"});
}

}  // namespace
}  // namespace tapeline
