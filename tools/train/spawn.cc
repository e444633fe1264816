#include "tools/train/spawn.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tools/train/exit_code.h"

namespace tapeline {
namespace {

constexpr char kSpawned[] = "TAPELINE_SPAWNED";

volatile std::sig_atomic_t passed_on = 0;

void note_signal(int number) { passed_on = number; }

// A pipe that a child writes lines into.
struct Lines {
  int descriptor = -1;
  int rank = 0;
  int to = STDOUT_FILENO;
  bool numbered = true;
  std::string begun;  // of the line that has not ended
};

void print(const Lines& from, std::string_view line) {
  const std::string text =
      absl::StrCat(from.numbered ? absl::StrCat(from.rank, " | ") : "",
                   std::string(line), "\n");
  size_t at = 0;
  while (at < text.size()) {
    const ssize_t n = ::write(from.to, text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return;  // nobody reads any more
    at += static_cast<size_t>(n);
  }
}

// False at the end of the pipe.
bool read_lines(Lines& from) {
  char buffer[4096];
  const ssize_t n = ::read(from.descriptor, buffer, sizeof(buffer));
  if (n < 0 && errno == EINTR) return true;
  if (n <= 0) {
    if (!from.begun.empty()) print(from, from.begun);
    from.begun.clear();
    close(from.descriptor);
    from.descriptor = -1;
    return false;
  }
  from.begun.append(buffer, static_cast<size_t>(n));
  for (;;) {
    const size_t end = from.begun.find('\n');
    if (end == std::string::npos) return true;
    print(from, std::string_view(from.begun).substr(0, end));
    from.begun.erase(0, end + 1);
  }
}

// A port that nobody uses now. Somebody may take it before a child does; then
// the child says so and all end.
int free_port() {
  const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t size = sizeof(address);
  int port = 0;
  if (s >= 0 && bind(s, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
      getsockname(s, reinterpret_cast<sockaddr*>(&address), &size) == 0) {
    port = ntohs(address.sin_port);
  }
  if (s >= 0) close(s);
  return port;
}

[[noreturn]] void become(const std::vector<std::string>& command, int rank,
                         int processes, int port, pid_t parent, int out,
                         int err) {
  // A group of its own: the terminal's signals come by way of the parent, once.
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(kExitCommunication);
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  const std::pair<const char*, std::string> variables[] = {
      {"RANK", absl::StrCat(rank)},
      {"LOCAL_RANK", absl::StrCat(rank)},
      {"WORLD_SIZE", absl::StrCat(processes)},
      {"LOCAL_WORLD_SIZE", absl::StrCat(processes)},
      {"MASTER_ADDR", "127.0.0.1"},
      // One below the store's port, which is what counts.
      {"MASTER_PORT", absl::StrCat(port - 1)},
      {"TAPELINE_STORE_PORT", absl::StrCat(port)},
      {"TAPELINE_JOB", absl::StrCat(parent, ":", port)},
      {kSpawned, absl::StrCat(parent)}};
  for (const auto& [name, value] : variables) setenv(name, value.c_str(), 1);
  std::vector<char*> words;
  for (const std::string& word : command) {
    words.push_back(const_cast<char*>(word.c_str()));
  }
  words.push_back(nullptr);
  execv("/proc/self/exe", words.data());
  const std::string error = absl::StrCat("tapeline: cannot run ", command[0],
                                         ": ", std::strerror(errno), "\n");
  (void)!::write(STDERR_FILENO, error.data(), error.size());
  _exit(kExitBadInput);
}

class Children {
 public:
  Children(const std::vector<std::string>& command, int processes,
           bool first_alone) {
    const int port = free_port();
    const pid_t parent = getpid();
    for (int rank = 0; rank < processes; ++rank) {
      int out[2], err[2];
      if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) {
        refuse("pipe");
        return;
      }
      const pid_t child = fork();
      if (child < 0) {
        refuse("fork");
        return;
      }
      if (child == 0) {
        become(command, rank, processes, port, parent, out[1], err[1]);
      }
      close(out[1]);
      close(err[1]);
      running_.push_back(child);
      killed_.push_back(false);
      const bool alone = first_alone && rank == 0;
      lines_.push_back({out[0],
                        rank,
                        first_alone && !alone ? STDERR_FILENO : STDOUT_FILENO,
                        !alone,
                        {}});
      lines_.push_back({err[0], rank, STDERR_FILENO, true, {}});
    }
  }

  bool any() const {
    for (const pid_t child : running_) {
      if (child != 0) return true;
    }
    return false;
  }
  int code() const { return code_; }
  void send(int signal) const {
    for (const pid_t child : running_) {
      if (child != 0) ::kill(child, signal);
    }
  }

  // Prints what they have said, up to `milliseconds` from now.
  void listen(int milliseconds) {
    std::vector<pollfd> polled;
    std::vector<Lines*> of;
    for (Lines& lines : lines_) {
      if (lines.descriptor < 0) continue;
      polled.push_back({lines.descriptor, POLLIN, 0});
      of.push_back(&lines);
    }
    if (poll(polled.data(), polled.size(), milliseconds) <= 0) return;
    for (size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].revents != 0) read_lines(*of[i]);
    }
  }
  // Notes who has ended.
  void collect() {
    for (size_t rank = 0; rank < running_.size(); ++rank) {
      int status = 0;
      if (running_[rank] == 0 ||
          waitpid(running_[rank], &status, WNOHANG) != running_[rank]) {
        continue;
      }
      running_[rank] = 0;
      const int code =
          WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      if (code == 0) continue;
      code_ = code_of_job(code_, code, killed_[rank]);
      if (!WIFEXITED(status)) {
        std::cerr << "tapeline: rank " << rank << " was ended by signal "
                  << WTERMSIG(status) << std::endl;
      }
    }
  }
  void kill_stopped() {
    for (size_t rank = 0; rank < running_.size(); ++rank) {
      siginfo_t of = {};
      if (running_[rank] != 0 &&
          waitid(P_PID, running_[rank], &of, WSTOPPED | WNOHANG | WNOWAIT) ==
              0 &&
          of.si_pid == running_[rank]) {
        kill(rank);
      }
    }
  }
  void kill_all() {
    for (size_t rank = 0; rank < running_.size(); ++rank) {
      if (running_[rank] != 0) kill(rank);
    }
  }
  // What is still in the pipes of children that have ended.
  void finish() {
    for (Lines& lines : lines_) {
      if (lines.descriptor < 0) continue;
      // A grandchild may hold the pipe open.
      fcntl(lines.descriptor, F_SETFL, O_NONBLOCK);
      while (read_lines(lines)) {
      }
    }
  }

 private:
  void kill(size_t rank) {
    ::kill(running_[rank], SIGKILL);
    killed_[rank] = true;
  }
  void refuse(const char* call) {
    std::cerr << "tapeline: --nproc: " << call
              << " failed: " << std::strerror(errno)
              << "; start fewer processes" << std::endl;
    code_ = kExitOutOfMemory;
  }

  std::vector<pid_t> running_;  // 0: ended
  std::vector<bool> killed_;    // by us
  std::vector<Lines> lines_;
  int code_ = 0;
};

}  // namespace

int code_of_job(int so_far, int code, bool killed_by_us) {
  const bool a_consequence = so_far == kExitCommunication && !killed_by_us;
  return so_far == 0 || a_consequence ? code : so_far;
}

bool was_spawned() {
  // Who inherits the variable from one that was is not.
  const char* parent = std::getenv(kSpawned);
  return parent != nullptr && parent == absl::StrCat(getppid());
}

int run_processes(const std::vector<std::string>& command, int processes,
                  double grace_seconds, bool first_alone) {
  struct sigaction action {};
  action.sa_handler = note_signal;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  using Clock = std::chrono::steady_clock;
  Children children(command, processes, first_alone);
  Clock::time_point failed;
  while (children.any()) {
    children.listen(20);
    if (passed_on != 0) {
      children.send(passed_on);
      passed_on = 0;
    }
    const bool before = children.code() != 0;
    children.collect();
    if (children.code() == 0) continue;
    if (!before) failed = Clock::now();
    const std::chrono::duration<double> since = Clock::now() - failed;
    if (since.count() > grace_seconds) {
      children.kill_all();
    } else {
      children.kill_stopped();
    }
  }
  children.finish();
  return children.code();
}

}  // namespace tapeline
