// Who this process is among those that were started together.
//
// Read from the environment of the launcher, the first of these that is there:
// torchrun's RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
// MASTER_PORT; Open MPI's OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK,
// _LOCAL_SIZE; Slurm's SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID,
// SLURM_NTASKS_PER_NODE, which are also there where mpirun was started in a
// Slurm job. MASTER_ADDR and MASTER_PORT are needed with all of them for more
// than one process; TAPELINE_STORE_PORT is the port of rank 0's store,
// MASTER_PORT + 1 unless given: the launcher may use MASTER_PORT itself.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace tapeline {

struct Launched {
  int rank = 0, world = 1, local_rank = 0;
  int local_world = 1;  // processes on this host, where the launcher says it
  std::string master = "127.0.0.1";
  int store_port = 0;
  // The same on all processes of a job: TAPELINE_JOB, or the launcher's own
  // name for it; empty if there is none.
  std::string job;
};

// `variable` is std::getenv, or a test's: nothing for one that is not set.
using Environment =
    std::function<std::optional<std::string>(const std::string& variable)>;
Environment process_environment();

// One process on its own if no launcher's variables are set. InvalidArgument
// for numbers that are none or contradict each other.
absl::StatusOr<Launched> read_launch(const Environment& variable);

}  // namespace tapeline
