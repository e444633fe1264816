// tapeline train: from a config file to a trained model.

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dist/launch.h"
#include "tools/config/config.h"
#include "tools/tapeline/verbs.h"
#include "tools/train/run.h"
#include "tools/train/spawn.h"

namespace tapeline {
namespace {

constexpr int64_t kMostProcesses = 1024;
constexpr int64_t kNotGiven = std::numeric_limits<int64_t>::min();

// This command so many times. Those that it starts run by themselves.
int start(int64_t processes) {
  if (processes < 1 || processes > kMostProcesses) {
    return fail(kExitUsage,
                absl::StrCat("--nproc must be from 1 to ", kMostProcesses));
  }
  if (process_environment()("RANK")) {
    return fail(kExitUsage,
                "--nproc starts processes, but RANK is set: this is one that a "
                "launcher has started; leave --nproc out");
  }
  return run_processes(command_line(), static_cast<int>(processes));
}

}  // namespace

int train_verb(const Arguments& arguments) {
  std::string config;
  std::vector<std::string> sets;
  bool print = false;
  OptionalText resume;
  int64_t threads = kAllThreads, processes = kNotGiven;
  Flags flags("train");
  flags.add("config", &config, "F", "TOML file (required)");
  flags.add("set", &sets, "KEY=VALUE", "over the file's value; repeatable");
  flags.add("print_config", &print, "",
            "print every setting and where it came from, and end");
  flags.add("resume", &resume, "PATH",
            "go on from the run's newest snapshot, or from this one");
  flags.add("threads", &threads, "N",
            "processors to use; the same as --set train.threads=N");
  flags.add("nproc", &processes, "N",
            "start N processes here, each with stages of the model");
  const absl::StatusOr<bool> parsed = parse_or_help(flags, arguments);
  if (!parsed.ok()) return fail(kExitUsage, parsed.status());
  if (!*parsed) return end_output();
  if (config.empty()) {
    return fail(kExitUsage, "--config is missing; give a TOML file");
  }
  if (const auto wrong = check_threads(threads); !wrong.empty()) {
    return fail(kExitUsage, wrong);
  }
  if (threads != kAllThreads)
    sets.push_back(absl::StrCat("train.threads=", threads));
  absl::StatusOr<Config> loaded = load_config(config_path(config), sets);
  if (!loaded.ok()) return fail(kExitBadInput, loaded.status());
  if (print) {
    std::cout << print_config(*loaded);
    return end_output();
  }
  if (processes != kNotGiven && !was_spawned()) return start(processes);
  RunRequest request;
  request.config = *std::move(loaded);
  if (const char* base = std::getenv("BUILD_WORKING_DIRECTORY")) {
    request.base = base;
  }
  request.resume = resume.given;
  request.snapshot = resume.value;
  request.command_line = command_line();
  const absl::Status end = run_training(request);
  if (end.ok()) return kExitDone;
  const int code = fail(exit_code(end), end);
  // Nothing may wait for a process that is gone.
  if (code == kExitCommunication) std::_Exit(code);
  return code;
}

}  // namespace tapeline
