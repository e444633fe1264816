#include "tools/tapeline/verbs.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "runtime/device.h"
#include "runtime/file.h"
#include "runtime/status.h"
#include "tools/train/open_device.h"

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

std::string check_device(const std::string& device) {
  if (device == "auto" || device == "cpu" || device == "cuda") return "";
  return absl::StrCat("--device is '", device, "'; use auto, cpu or cuda");
}

absl::Status use_device(const std::string& device, int64_t threads) {
  const auto all = static_cast<int64_t>(std::thread::hardware_concurrency());
  Device::current().set_threads(
      static_cast<int>(std::max<int64_t>(1, threads > 0 ? threads : all)));
  ASSIGN_OR_RETURN(std::unique_ptr<Device> opened, open_device(device));
  // Leaked: what the verb made lives until the process ends.
  if (opened) new DeviceScope(*opened.release());
  return absl::OkStatus();
}

}  // namespace tapeline
