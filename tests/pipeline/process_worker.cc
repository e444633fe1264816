// One process of a pipeline of processes on the micro model, for
// processes_test. Started with a launcher's variables.
//
//   process_worker --schedule s.txt --out result --deadline 5 [--fault ...]
//
// --fault kill:STAGE:MICRO_BATCH, stall:..., shape:STAGE:0, truncate:NUMBER:0
// concern the rank that has the stage (the rank that is given it, for
// truncate). Writes losses and gradients as hexadecimal floats. Exit code 72:
// the step failed.
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "dist/gloo_communicator.h"
#include "dist/launch.h"
#include "dist/pipeline/testing/micro_model.h"
#include "dist/pipeline/text.h"

namespace tapeline {
namespace {

constexpr int kRankLost = 72;

struct Fault {
  std::string kind;
  int at = -1, micro_batch = 0;
};

int fail(const absl::Status& status) {
  std::cerr << status.message() << std::endl;
  // No destructor may wait for a peer that is gone.
  _exit(kRankLost);
}

int run(std::map<std::string, std::string> flags) {
  Fault fault;
  if (!flags["--fault"].empty()) {
    const std::vector<std::string> parts =
        absl::StrSplit(flags["--fault"], ':');
    fault.kind = parts.at(0);
    if (!absl::SimpleAtoi(parts.at(1), &fault.at) ||
        !absl::SimpleAtoi(parts.at(2), &fault.micro_batch)) {
      return 2;
    }
  }
  const absl::StatusOr<Launched> launch = read_launch(process_environment());
  if (!launch.ok()) return fail(launch.status());
  const absl::StatusOr<Schedule> schedule = read_schedule(flags["--schedule"]);
  if (!schedule.ok()) return fail(schedule.status());
  double deadline = 60;
  if (!flags["--deadline"].empty() &&
      !absl::SimpleAtod(flags["--deadline"], &deadline)) {
    return 2;
  }

  GlooOptions gloo;
  if (fault.kind == "truncate") gloo.truncate = fault.at;
  absl::StatusOr<std::unique_ptr<GlooCommunicator>> communicator =
      GlooCommunicator::connect(*launch, gloo);
  if (!communicator.ok()) return fail(communicator.status());

  MicroOptions options;
  options.executor.deadline = absl::Seconds(deadline);
  options.executor.warn_after = absl::Seconds(deadline / 2);
  options.on_forward = [&](int stage, int j) {
    if (stage == fault.at && j == fault.micro_batch) {
      if (fault.kind == "kill") kill(getpid(), SIGKILL);
      if (fault.kind == "stall") sleep(1000);
    }
    return absl::OkStatus();
  };
  options.on_inputs = [&](int stage, std::vector<TensorSpec>& specs) {
    if (fault.kind == "shape" && stage == fault.at) ++specs[0].shape[0];
  };
  const MicroResult got = micro_rank(*schedule, **communicator, options);
  const absl::Status& status = got.status[launch->rank];
  if (!status.ok()) return fail(status);
  const absl::Status end = (*communicator)->barrier(absl::Seconds(deadline));
  if (!end.ok()) return fail(end);

  std::ofstream out(flags["--out"]);
  const auto write = [&](const std::string& name,
                         const std::vector<float>& values) {
    out << name;
    for (const float value : values) {
      char text[64];
      std::snprintf(text, sizeof(text), " %a", double{value});
      out << text;
    }
    out << "\n";
  };
  write("losses", got.losses);
  for (const auto& [name, gradient] : got.gradients) write(name, gradient);
  write("sent", {static_cast<float>(got.counters[launch->rank].sent)});
  return 0;
}

}  // namespace
}  // namespace tapeline

int main(int argc, char** argv) {
  std::map<std::string, std::string> flags;
  for (int i = 1; i + 1 < argc; i += 2) flags[argv[i]] = argv[i + 1];
  return tapeline::run(std::move(flags));
}
