// tapeline train: from a config file to a trained model.

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tools/config/config.h"
#include "tools/tapeline/verbs.h"
#include "tools/train/run.h"

namespace tapeline {

int train_verb(const Arguments& arguments) {
  std::string config;
  std::vector<std::string> sets;
  bool print = false;
  OptionalText resume;
  int64_t threads = kAllThreads;
  Flags flags("train");
  flags.add("config", &config, "F", "TOML file (required)");
  flags.add("set", &sets, "KEY=VALUE", "over the file's value; repeatable");
  flags.add("print_config", &print, "",
            "print every setting and where it came from, and end");
  flags.add("resume", &resume, "PATH",
            "go on from the run's newest snapshot, or from this one");
  flags.add("threads", &threads, "N",
            "processors to use; the same as --set train.threads=N");
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
  RunRequest request;
  request.config = *std::move(loaded);
  if (const char* base = std::getenv("BUILD_WORKING_DIRECTORY")) {
    request.base = base;
  }
  request.resume = resume.given;
  request.snapshot = resume.value;
  request.command_line = command_line();
  const absl::Status end = run_training(request);
  return end.ok() ? kExitDone : fail(exit_code(end), end);
}

}  // namespace tapeline
