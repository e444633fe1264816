// The communicator of a run: TCP between CPU processes, NCCL between GPUs, and
// none for one process alone.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dist/communicator.h"
#include "dist/compare_settings.h"
#include "dist/launch.h"
#include "runtime/device.h"
#include "tools/train/pipeline_plan.h"

namespace tapeline {

// Blocks until all processes are there, at most 10 seconds longer than the
// timeout. They must have the same `settings`. Errors carry kExitCommunication;
// settings that differ and what this build cannot do, kExitBadInput. Cancelled:
// `stop` said so.
absl::StatusOr<std::unique_ptr<Communicator>> connect_processes(
    const Launched& launch, const PipelinePlan& plan, DeviceKind device,
    absl::Duration connect_timeout, absl::Duration deadline,
    const std::vector<Setting>& settings = {}, TcpStore::Stop stop = nullptr);

}  // namespace tapeline
