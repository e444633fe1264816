#include "tools/tapeline/verbs.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <thread>

#include "absl/strings/str_replace.h"
#include "runtime/device.h"
#include "runtime/file.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

Arguments& words() {
  static Arguments& words = *new Arguments;
  return words;
}

}  // namespace

int fail(ExitCode code, std::string_view message) {
  std::string line(message);
  while (line.ends_with('\n')) line.pop_back();
  absl::StrReplaceAll({{"\n", ", "}}, &line);
  std::cout << std::flush;
  std::cerr << "tapeline: " << line << std::endl;
  return code;
}

int fail(ExitCode code, const absl::Status& status) {
  const absl::string_view message = status.message();
  return fail(code, std::string_view(message.data(), message.size()));
}

int end_output() {
  std::cout.flush();
  if (std::cout) return kExitDone;
  return fail(kExitDisk,
              "stdout: write failed; free some space or write elsewhere");
}

std::string_view check_threads(int64_t threads) {
  if (threads == kAllThreads || (threads >= 1 && threads <= 1024)) return "";
  return "--threads must be from 1 to 1024";
}

absl::StatusOr<bool> parse_or_help(Flags& flags, const Arguments& arguments) {
  for (const std::string& word : arguments) {
    if (word == "--help" || word == "-h") {
      std::cout << flags.help();
      return false;
    }
  }
  RETURN_IF_ERROR(flags.parse(arguments));
  return true;
}

const Arguments& command_line() { return words(); }
void set_command_line(Arguments line) { words() = std::move(line); }

std::string user_path(const std::string& path) {
  const char* folder = std::getenv("BUILD_WORKING_DIRECTORY");
  if (path.empty() || folder == nullptr) return path;
  return join_path(folder, path);
}

std::string config_path(const std::string& path) {
  const std::string theirs = user_path(path);
  return !path_exists(theirs) && path_exists(path) ? path : theirs;
}

std::string user_corpus(const std::string& spec) {
  return spec.starts_with("king_james:") ? spec : user_path(spec);
}

void use_threads(int64_t threads) {
  const auto all = static_cast<int64_t>(std::thread::hardware_concurrency());
  Device::current().set_threads(
      static_cast<int>(std::max<int64_t>(1, threads > 0 ? threads : all)));
}

}  // namespace tapeline
