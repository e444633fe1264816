// From which snapshot a run goes on, and whether it may.
//
// A run that goes on repeats the bits of an uninterrupted one only with the
// same model, data, order and batch: a change of those is an error that names
// the key and both values.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dist/snapshot.h"
#include "runtime/json.h"
#include "tools/config/config.h"

namespace tapeline {

// The snapshot at `path`, or where that is empty the newest usable one below
// `root`; what is wrong with newer ones is appended to `notes`. Errors carry
// their exit code: kExitSnapshot if there is none that is usable, kExitBadInput
// for a path that is no snapshot, kExitDisk if root cannot be listed.
absl::StatusOr<Snapshot> choose_snapshot(const std::string& root,
                                         const std::string& path,
                                         std::vector<std::string>* notes);

// InvalidArgument if `config` or `model_config` would not go on with the run
// that the snapshot was taken from.
absl::Status check_continues(const Snapshot& snapshot, const Config& config,
                             const Json& model_config);

}  // namespace tapeline
