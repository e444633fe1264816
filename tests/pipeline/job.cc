#include "tests/pipeline/job.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "dist/tcp_store.h"
#include "runtime/check.h"

namespace tapeline {
namespace {

constexpr double kMostSeconds = 240;

std::string file_text(const std::string& path) {
  std::ifstream in(path);
  std::stringstream out;
  out << in.rdbuf();
  return out.str();
}

// One that is free now, and will be for the moment that a job needs.
int free_port() { return TcpStoreServer::start(0).value()->port(); }

[[noreturn]] void become(std::vector<std::string> command,
                         const std::string& err) {
  const int file = open(err.c_str(), O_WRONLY | O_CREAT, 0600);
  dup2(file, 2);
  std::vector<char*> arguments;
  for (std::string& argument : command) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  execv(arguments[0], arguments.data());
  _exit(127);
}

}  // namespace

std::string new_folder() {
  const char* base = std::getenv("TEST_TMPDIR");
  std::string folder =
      absl::StrCat(base != nullptr ? base : "/tmp", "/job_XXXXXX");
  CHECK(mkdtemp(folder.data()) != nullptr) << folder;
  return folder;
}

std::vector<Ended> run_job(
    int ranks,
    const std::function<std::vector<std::string>(int, const std::string&)>&
        command,
    int waits_not_for) {
  const std::string folder = new_folder();
  const std::string port = absl::StrCat(free_port());
  const auto path = [&](int rank, const char* what) {
    return absl::StrCat(folder, "/", rank, ".", what);
  };
  std::vector<pid_t> children;
  for (int r = 0; r < ranks; ++r) {
    const std::vector<std::string> words = command(r, path(r, "out"));
    const pid_t child = fork();
    CHECK_GE(child, 0);
    if (child == 0) {
      setenv("RANK", absl::StrCat(r).c_str(), 1);
      setenv("WORLD_SIZE", absl::StrCat(ranks).c_str(), 1);
      setenv("LOCAL_RANK", absl::StrCat(r).c_str(), 1);
      setenv("MASTER_ADDR", "127.0.0.1", 1);
      setenv("MASTER_PORT", "29500", 1);
      setenv("TAPELINE_STORE_PORT", port.c_str(), 1);
      become(words, path(r, "err"));
    }
    children.push_back(child);
  }
  std::vector<Ended> out(static_cast<size_t>(ranks));
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() -
                                         begin)
        .count();
  };
  const auto awaited = [&] {
    for (int r = 0; r < ranks; ++r) {
      if (children[r] != 0 && r != waits_not_for) return true;
    }
    return false;
  };
  while (awaited() && seconds() < kMostSeconds) {
    for (int r = 0; r < ranks; ++r) {
      int status = 0;
      if (children[r] == 0 ||
          waitpid(children[r], &status, WNOHANG) != children[r]) {
        continue;
      }
      children[r] = 0;
      out[r].seconds = seconds();
      if (WIFEXITED(status)) out[r].code = WEXITSTATUS(status);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  for (int r = 0; r < ranks; ++r) {
    if (children[r] != 0) {
      kill(children[r], SIGKILL);
      waitpid(children[r], nullptr, 0);
      out[r].seconds = seconds();
    }
    out[r].err = file_text(path(r, "err"));
    out[r].out = file_text(path(r, "out"));
  }
  return out;
}

}  // namespace tapeline
