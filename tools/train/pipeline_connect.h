// The communicator of a run: TCP between CPU processes, NCCL between GPUs, and
// none for one process alone.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dist/communicator.h"
#include "dist/launch.h"
#include "runtime/device.h"
#include "tools/train/pipeline_plan.h"

namespace tapeline {

// Blocks until all processes are there, or the timeout. Errors carry
// kExitCommunication; what this build cannot do, kExitBadInput.
absl::StatusOr<std::unique_ptr<Communicator>> connect_processes(
    const Launched& launch, const PipelinePlan& plan, DeviceKind device,
    absl::Duration connect_timeout, absl::Duration deadline);

}  // namespace tapeline
