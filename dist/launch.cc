#include "dist/launch.h"

#include <cstdlib>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

constexpr int kMostRanks = 1 << 20, kMostPorts = 65535;

struct Launcher {
  const char *name, *rank, *world, *local_rank, *local_world, *job;
};
constexpr Launcher kLaunchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
     "TORCHELASTIC_RUN_ID"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
     "PMIX_NAMESPACE"},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
     "SLURM_NTASKS_PER_NODE", "SLURM_JOB_ID"},
};

absl::StatusOr<int> number(const Environment& variable, const char* name,
                           int least, int most, std::optional<int> absent) {
  const std::optional<std::string> text = variable(name);
  if (!text) {
    if (absent) return *absent;
    return absl::InvalidArgumentError(
        absl::StrCat("the environment lacks ", name, "; start with torchrun, ",
                     "srun or mpirun, or set it"));
  }
  int value = 0;
  if (!absl::SimpleAtoi(*text, &value) || value < least || value > most) {
    return absl::InvalidArgumentError(
        absl::StrCat("the variable ", name, " is '", *text,
                     "', not a number from ", least, " to ", most));
  }
  return value;
}

}  // namespace

Environment process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return value;
  };
}

absl::StatusOr<Launched> read_launch(const Environment& variable) {
  Launched out;
  const Launcher* launcher = nullptr;
  for (const Launcher& l : kLaunchers) {
    if (launcher == nullptr && variable(l.rank)) launcher = &l;
  }
  if (launcher == nullptr) return out;
  ASSIGN_OR_RETURN(out.world, number(variable, launcher->world, 1, kMostRanks,
                                     std::nullopt));
  ASSIGN_OR_RETURN(out.rank, number(variable, launcher->rank, 0, out.world - 1,
                                    std::nullopt));
  ASSIGN_OR_RETURN(out.local_rank, number(variable, launcher->local_rank, 0,
                                          out.world - 1, out.rank));
  ASSIGN_OR_RETURN(out.local_world,
                   number(variable, launcher->local_world, 1, kMostRanks, 1));
  if (out.world == 1) return out;
  const std::optional<std::string> master = variable("MASTER_ADDR");
  if (!master || master->empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(launcher->name, " started ", out.world,
                     " processes, but MASTER_ADDR is not set; set it to the "
                     "host of rank 0"));
  }
  out.master = *master;
  const std::optional<std::string> job = variable("TAPELINE_JOB");
  out.job = job ? *job : variable(launcher->job).value_or("");
  ASSIGN_OR_RETURN(const int port, number(variable, "MASTER_PORT", 1,
                                          kMostPorts - 1, std::nullopt));
  ASSIGN_OR_RETURN(out.store_port, number(variable, "TAPELINE_STORE_PORT", 1,
                                          kMostPorts, port + 1));
  return out;
}

}  // namespace tapeline
