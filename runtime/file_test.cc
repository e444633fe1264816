#include "runtime/file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string>

#include "gtest/gtest.h"
#include "runtime/fault.h"

namespace tapeline {
namespace {

class FileTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "file_test_" +
              testing::UnitTest::GetInstance()->current_test_info()->name();
    ASSERT_TRUE(remove_path(folder_).ok());
    ASSERT_TRUE(make_directories(folder_).ok());
  }
  void TearDown() override { ASSERT_TRUE(set_fault("")); }
  std::string path(const std::string& name) const {
    return join_path(folder_, name);
  }
  size_t entries() const { return list_directory(folder_)->size(); }
  std::string folder_;
};

TEST_F(FileTest, WritesAndReadsBack) {
  std::string text("a\0b\n", 4);
  ASSERT_TRUE(write_file_atomic(path("x"), text).ok());
  EXPECT_EQ(*read_file(path("x")), text);
  ASSERT_TRUE(write_file_atomic(path("x"), "").ok());
  EXPECT_EQ(*read_file(path("x")), "");
  EXPECT_EQ(entries(), 1u);
}

TEST_F(FileTest, ReadsAtAnOffset) {
  ASSERT_TRUE(write_file_atomic(path("x"), "0123456789").ok());
  const auto file = File::open(path("x"));
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->size(), 10u);
  char out[3];
  ASSERT_TRUE(file->read_at(7, out, 3).ok());
  EXPECT_EQ(std::string(out, 3), "789");
}

TEST_F(FileTest, ReadingPastTheEndNamesTheByte) {
  ASSERT_TRUE(write_file_atomic(path("x"), "0123").ok());
  const auto file = File::open(path("x"));
  char out[4];
  const absl::Status status = file->read_at(2, out, 4);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(std::string(status.message()),
            path("x") +
                ": ends at byte 4, 2 bytes early; the file is cut or "
                "changing");
}

TEST_F(FileTest, AFileThatShrinksAfterOpeningIsDataLoss) {
  ASSERT_TRUE(write_file_atomic(path("x"), "0123").ok());
  const auto file = File::open(path("x"));
  ASSERT_EQ(truncate(path("x").c_str(), 1), 0);
  char out[4];
  EXPECT_EQ(file->read_at(0, out, 4).code(), absl::StatusCode::kDataLoss);
}

TEST_F(FileTest, ErrorsSayCallPathAndReason) {
  const absl::Status missing = read_file(path("none")).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(std::string(missing.message()),
            path("none") + ": open failed: No such file or directory");
  EXPECT_EQ(read_file(folder_).status().code(),
            absl::StatusCode::kFailedPrecondition);
  ASSERT_EQ(mkfifo(path("fifo").c_str(), 0600), 0);
  EXPECT_EQ(File::open(path("fifo")).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(write_file_atomic(path("no/x"), "a").code(),
            absl::StatusCode::kNotFound);
  ASSERT_TRUE(write_file_atomic(path("x"), "a").ok());
  EXPECT_EQ(make_directories(path("x/y")).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(list_directory(path("none")).ok());
}

TEST_F(FileTest, RefusesAFileAboveTheLimit) {
  ASSERT_TRUE(write_file_atomic(path("x"), "0123456789").ok());
  EXPECT_TRUE(read_file(path("x"), 10).ok());
  EXPECT_EQ(read_file(path("x"), 9).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(FileTest, AnUncommittedWriterLeavesNothing) {
  {
    auto writer = FileWriter::create(path("x"));
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE(writer->append("abc").ok());
    EXPECT_FALSE(path_exists(path("x")));
    EXPECT_EQ(entries(), 1u);
  }
  EXPECT_EQ(entries(), 0u);
}

// write, fsync of the file, rename, fsync of the folder.
constexpr int kPoints = 4;

TEST_F(FileTest, AWritePassesFourFaultPoints) {
  ASSERT_TRUE(set_fault(""));
  ASSERT_TRUE(write_file_atomic(path("x"), "old").ok());
  EXPECT_EQ(fault_points(), kPoints);
}

TEST_F(FileTest, AnErrorAtAnyPointLeavesOldOrNewAndNoTemporary) {
  for (const char* kind : {"eio:", "enospc:"}) {
    for (int point = 1; point <= kPoints; ++point) {
      ASSERT_TRUE(set_fault(""));
      ASSERT_TRUE(write_file_atomic(path("x"), "old").ok());
      ASSERT_TRUE(set_fault(kind + std::to_string(point)));
      const absl::Status status = write_file_atomic(path("x"), "new");
      ASSERT_TRUE(set_fault(""));
      ASSERT_FALSE(status.ok()) << kind << point;
      EXPECT_EQ(status.code(), kind[1] == 'i'
                                   ? absl::StatusCode::kDataLoss
                                   : absl::StatusCode::kResourceExhausted)
          << status;
      EXPECT_EQ(*read_file(path("x")), point < kPoints ? "old" : "new");
      EXPECT_EQ(entries(), 1u) << kind << point;
    }
  }
}

TEST_F(FileTest, AKillAtAnyPointLeavesOldOrNew) {
  for (int point = 1; point <= kPoints; ++point) {
    ASSERT_TRUE(set_fault(""));
    ASSERT_TRUE(write_file_atomic(path("x"), "old").ok());
    const pid_t child = fork();
    if (child == 0) {
      set_fault("kill:" + std::to_string(point));
      (void)write_file_atomic(path("x"), "new");
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << point;
    EXPECT_EQ(*read_file(path("x")), point < kPoints ? "old" : "new");
  }
}

TEST_F(FileTest, InterruptedAndShortCallsGoOn) {
  for (const char* fault :
       {"eintr:1", "eintr:2", "eintr:3", "eintr:4", "short:1", "short:1+"}) {
    ASSERT_TRUE(set_fault(fault));
    EXPECT_TRUE(write_file_atomic(path("x"), fault).ok()) << fault;
    ASSERT_TRUE(set_fault(""));
    EXPECT_EQ(*read_file(path("x")), fault);
  }
}

TEST_F(FileTest, AFullDeviceIsResourceExhausted) {
  // The limit stands in for a full disk: the kernel refuses the write itself.
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{.rlim_cur = 1000, .rlim_max = 1000};
    setrlimit(RLIMIT_FSIZE, &limit);
    const absl::Status status =
        write_file_atomic(path("x"), std::string(5000, 'a'));
    _exit(status.code() == absl::StatusCode::kResourceExhausted ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(entries(), 0u);
}

TEST_F(FileTest, RemovesATreeButNotWhatALinkPointsTo) {
  ASSERT_TRUE(make_directories(path("a/b/c")).ok());
  ASSERT_TRUE(write_file_atomic(path("a/b/x"), "1").ok());
  ASSERT_TRUE(write_file_atomic(path("kept"), "2").ok());
  ASSERT_EQ(symlink(path("kept").c_str(), path("a/link").c_str()), 0);
  ASSERT_EQ(symlink(folder_.c_str(), path("a/up").c_str()), 0);
  EXPECT_TRUE(remove_path(path("a")).ok());
  EXPECT_EQ(*list_directory(folder_), std::vector<std::string>{"kept"});
  EXPECT_TRUE(remove_path(path("a")).ok());
}

TEST_F(FileTest, MakesFoldersPrivate) {
  ASSERT_TRUE(make_directories(path("a/b")).ok());
  ASSERT_TRUE(make_directories(path("a/b")).ok());
  struct stat info;
  ASSERT_EQ(stat(path("a/b").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0077, 0u);
}

TEST_F(FileTest, ListsSorted) {
  for (const char* name : {"b", "a", "c"}) {
    ASSERT_TRUE(write_file_atomic(path(name), "").ok());
  }
  EXPECT_EQ(*list_directory(folder_),
            (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_GT(*free_disk_bytes(folder_), 0u);
}

TEST(Path, PartsAndJoins) {
  EXPECT_EQ(parent_path("a/b/c"), "a/b");
  EXPECT_EQ(parent_path("c"), ".");
  EXPECT_EQ(parent_path("/c"), "/");
  EXPECT_EQ(join_path("a", "b"), "a/b");
  EXPECT_EQ(join_path("a/", "b"), "a/b");
  EXPECT_EQ(join_path("a", "/b"), "/b");
  EXPECT_EQ(join_path("", "b"), "b");
}

TEST(Fault, RefusesWhatItDoesNotUnderstand) {
  for (const char* bad : {"kill", "kill:", "kill:0", "kill:-1", "kill:1x",
                          "boom:1", "kill:+", "eio:1++"}) {
    EXPECT_FALSE(set_fault(bad)) << bad;
  }
  EXPECT_TRUE(set_fault("eio:3+"));
  EXPECT_TRUE(set_fault(""));
}

}  // namespace
}  // namespace tapeline
