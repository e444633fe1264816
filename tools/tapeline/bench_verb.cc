// tapeline bench: time and memory of a model's forward and backward pass, and
// what a pipeline's stages and messages take.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "dist/launch.h"
#include "runtime/cuda_monitor.h"
#include "runtime/device.h"
#include "runtime/file.h"
#include "tools/config/config.h"
#include "tools/tapeline/verbs.h"
#include "tools/train/bench.h"
#include "tools/train/bench_pipeline.h"
#include "tools/train/open_device.h"
#include "tools/train/provenance.h"
#include "tools/train/run_options.h"
#include "tools/train/spawn.h"

namespace tapeline {
namespace {

constexpr int64_t kMostProcesses = 64;
constexpr int64_t kNotGiven = std::numeric_limits<int64_t>::min();

template <class Report>
int print(const absl::StatusOr<Report>& report, bool json) {
  if (!report.ok()) return fail(exit_code(report.status()), report.status());
  std::cout << (json ? to_json(*report).dump() + "\n" : to_text(*report));
  return end_output();
}

StagesOptions stages_options(const Config& c, const BenchOptions& options) {
  StagesOptions out;
  out.ranks = static_cast<int>(std::max<int64_t>(1, c.pipeline.ranks));
  out.warmup = options.warmup;
  out.repeats = options.repeats;
  out.model_path = user_path(c.model.path);
  out.data = user_corpus(c.data.train);
  out.schedule_file = user_path(c.pipeline.file);
  return out;
}

int messages(const Config& c, const BenchOptions& options, bool json) {
  const absl::StatusOr<Launched> launch = read_launch(process_environment());
  if (!launch.ok()) return fail(kExitBadInput, launch.status());
  if (launch->world < 2) {
    return fail(kExitUsage,
                "--messages needs processes to exchange them; --nproc 2, or "
                "start them with a launcher");
  }
  absl::StatusOr<std::unique_ptr<Device>> device =
      open_device(c.device, launch->local_rank);
  if (!device.ok()) return fail(kExitBadInput, device.status());
  std::optional<DeviceScope> scope;
  if (*device) scope.emplace(**device);
  const absl::StatusOr<MessagesReport> report =
      bench_messages(c, *launch, stages_options(c, options));
  const int code =
      launch->rank == 0 || !report.ok() ? print(report, json) : int{kExitDone};
  // Nothing may wait for a process that is gone.
  if (code == kExitCommunication) std::_Exit(code);
  return code;
}

}  // namespace

int bench_verb(const Arguments& arguments) {
  std::string config, trace;
  std::vector<std::string> sets;
  BenchOptions options;
  bool fwd_bwd = false, json = false, stages = false, with_messages = false;
  int64_t processes = kNotGiven;
  int64_t threads = kAllThreads, batch = kNotGiven;
  Flags flags("bench");
  flags.add("config", &config, "F", "TOML file (required)");
  flags.add("set", &sets, "KEY=VALUE", "over the file's value; repeatable");
  flags.add("batch", &batch, "B", "sequences; 1");
  flags.add("seq", &options.seq, "S", "tokens of each; train.seq_len");
  flags.add("fwd_bwd", &fwd_bwd, "", "forward and backward pass");
  flags.add("stages", &stages, "",
            "instead: F, I, W and B of each stage that a pipeline of "
            "pipeline.ranks has, all here, over training's micro-batches");
  flags.add("messages", &with_messages, "",
            "instead: a pipeline's messages between processes, there and back");
  flags.add("nproc", &processes, "N",
            "with --messages: start N processes here");
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
  if (int{fwd_bwd} + int{stages} + int{with_messages} != 1) {
    return fail(kExitUsage, "give one of --fwd_bwd, --stages and --messages");
  }
  if (!fwd_bwd && (options.alternate || !trace.empty() || options.seq != 0 ||
                   batch != kNotGiven)) {
    return fail(kExitUsage,
                "--batch, --seq, --alternate and --trace go with --fwd_bwd; "
                "micro-batches of a pipeline are those of the config");
  }
  if (batch != kNotGiven) options.batch = batch;
  if (processes != kNotGiven && !with_messages) {
    return fail(kExitUsage, "--nproc goes with --messages");
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
  if (with_messages) {
    if (processes != kNotGiven && !was_spawned()) {
      if (outside(processes, 2, kMostProcesses)) {
        return fail(kExitUsage,
                    absl::StrCat("--nproc must be from 2 to ", kMostProcesses));
      }
      return run_processes(command_line(), static_cast<int>(processes),
                           /*grace_seconds=*/15, /*first_alone=*/json);
    }
    return messages(*loaded, options, json);
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
  if (stages) {
    return print(bench_stages(*loaded, stages_options(*loaded, options)), json);
  }
  const absl::StatusOr<BenchReport> report =
      bench_forward_backward(*loaded, user_path(loaded->model.path), options);
  if (!report.ok()) return fail(kExitBadInput, report.status());
  if (report->traced) {
    const absl::Status written =
        write_file_atomic(user_path(trace), chrome_trace(*report->traced));
    if (!written.ok()) return fail(kExitDisk, written);
  }
  if (!json) {
    std::cout << to_text(*report);
    return end_output();
  }
  Json out = to_json(*report);
  out["provenance"] =
      provenance(command_line(), static_cast<uint64_t>(loaded->seed),
                 Device::current().threads().threads());
  std::cout << out.dump() << "\n";
  return end_output();
}

}  // namespace tapeline
