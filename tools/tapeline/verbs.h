// The verbs of the tapeline binary, and how each ends.
//
// A verb takes its arguments and returns the exit code. A failure is one line
// on stderr: what is wrong, where, and what to do. With --json stdout holds one
// JSON value and nothing else.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/json.h"
#include "tools/tapeline/flags.h"
#include "tools/train/exit_code.h"

namespace tapeline {

using Arguments = std::vector<std::string>;
int train_verb(const Arguments& arguments);
int generate_verb(const Arguments& arguments);
int eval_verb(const Arguments& arguments);
int parity_verb(const Arguments& arguments);
int ckpt_verb(const Arguments& arguments);
int plan_verb(const Arguments& arguments);
int bench_verb(const Arguments& arguments);
int schedule_verb(const Arguments& arguments);

// "tapeline: <message>" on stderr, on one line; returns the code.
int fail(ExitCode code, std::string_view message);
int fail(ExitCode code, const absl::Status& status);

// Parses; prints the help for --help. A value is the code to end with.
absl::StatusOr<bool> parse_or_help(Flags& flags, const Arguments& arguments);

// Ends a verb: what was printed reached stdout, or kExitDisk.
int end_output();

// --threads N: kAllThreads where not given.
inline constexpr int64_t kAllThreads = std::numeric_limits<int64_t>::min();
std::string_view check_threads(int64_t threads);  // what is wrong, or empty

// The arguments of this process, program name first.
const Arguments& command_line();
void set_command_line(Arguments words);

// A relative path, against the folder in which `bazel run` was called.
std::string user_path(const std::string& path);
// A config as the user means it, or as a file that came with the program:
// `bazel run` starts in the folder that holds those.
std::string config_path(const std::string& path);
// The same for data.train and --data, which may also name a built-in text.
std::string user_corpus(const std::string& spec);

// --device: what is wrong with it, or empty.
std::string check_device(const std::string& device);
// The verb runs there until the process ends. On the CPU kernels share so many
// threads, which never changes a result.
absl::Status use_device(const std::string& device, int64_t threads);

}  // namespace tapeline
