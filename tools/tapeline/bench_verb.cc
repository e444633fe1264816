// tapeline bench: time and memory of a model's forward and backward pass.

#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "runtime/cuda_monitor.h"
#include "runtime/file.h"
#include "tools/config/config.h"
#include "tools/tapeline/verbs.h"
#include "tools/train/bench.h"
#include "tools/train/run_options.h"

namespace tapeline {

int bench_verb(const Arguments& arguments) {
  std::string config, trace;
  std::vector<std::string> sets;
  BenchOptions options;
  bool fwd_bwd = false, json = false;
  int64_t threads = kAllThreads;
  Flags flags("bench");
  flags.add("config", &config, "F", "TOML file (required)");
  flags.add("set", &sets, "KEY=VALUE", "over the file's value; repeatable");
  flags.add("batch", &options.batch, "B", "sequences");
  flags.add("seq", &options.seq, "S", "tokens of each; train.seq_len");
  flags.add("fwd_bwd", &fwd_bwd, "", "forward and backward pass (required)");
  flags.add("warmup", &options.warmup, "N", "passes before the timed ones");
  flags.add("repeats", &options.repeats, "N", "passes to time");
  flags.add("alternate", &options.alternate, "",
            "a pass without offload behind each timed one, to compare with");
  flags.add("trace", &trace, "FILE",
            "watch one more pass on the GPU: its ten largest items, and the "
            "whole for chrome://tracing");
  flags.add("threads", &threads, "N", "processors to use");
  flags.add("json", &json, "", "print one JSON object");
  const absl::StatusOr<bool> parsed = parse_or_help(flags, arguments);
  if (!parsed.ok()) return fail(kExitUsage, parsed.status());
  if (!*parsed) return end_output();
  if (config.empty()) {
    return fail(kExitUsage, "--config is missing; give a TOML file");
  }
  if (!fwd_bwd) {
    return fail(kExitUsage,
                "--fwd_bwd is missing; it is what can be measured so far");
  }
  const auto outside = [](int64_t value, int64_t least, int64_t most) {
    return value < least || value > most;
  };
  if (outside(options.batch, 1, 65536)) {
    return fail(kExitUsage, "--batch must be from 1 to 65536");
  }
  if (outside(options.seq, 0, 1048576)) {
    return fail(kExitUsage, "--seq must be from 1 to 1048576");
  }
  if (outside(options.warmup, 0, 1000)) {
    return fail(kExitUsage, "--warmup must be from 0 to 1000");
  }
  if (outside(options.repeats, 1, 1000)) {
    return fail(kExitUsage, "--repeats must be from 1 to 1000");
  }
  if (const auto wrong = check_threads(threads); !wrong.empty()) {
    return fail(kExitUsage, wrong);
  }
  const absl::StatusOr<Config> loaded = load_config(config_path(config), sets);
  if (!loaded.ok()) return fail(kExitBadInput, loaded.status());
  if (const absl::Status status = check_settings(*loaded); !status.ok()) {
    return fail(kExitBadInput, status);
  }
  if (options.alternate && !loaded->offload.activations &&
      !loaded->offload.ids) {
    return fail(kExitUsage,
                "--alternate compares with offload, but the config has none; "
                "--set offload.activations=true");
  }
  options.trace = !trace.empty();
  if (options.seq == 0) options.seq = loaded->train.seq_len;
  if (const absl::Status status = use_device(loaded->device, threads);
      !status.ok()) {
    return fail(kExitBadInput, status);
  }
  const absl::StatusOr<BenchReport> report =
      bench_forward_backward(*loaded, user_path(loaded->model.path), options);
  if (!report.ok()) return fail(kExitBadInput, report.status());
  if (report->traced) {
    const absl::Status written =
        write_file_atomic(user_path(trace), chrome_trace(*report->traced));
    if (!written.ok()) return fail(kExitDisk, written);
  }
  std::cout << (json ? to_json(*report).dump() + "\n" : to_text(*report));
  return end_output();
}

}  // namespace tapeline
