// Short texts that every rank tells every other: settings, paths, errors.
//
// Made of sums of whole numbers, in which each rank has its own places, so
// every communicator can do it and no bit changes. Of kilobytes to megabytes,
// not of tensors.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dist/communicator.h"

namespace tapeline {

// A collective of all ranks.
Collective everyone(const Communicator& communicator, std::string name);

// What each rank says, by rank. `name` is the same on all.
absl::StatusOr<std::vector<std::string>> all_gather(Communicator& communicator,
                                                    const std::string& name,
                                                    const std::string& mine,
                                                    absl::Duration timeout);

// The sums of all ranks' values, entry by entry, in the order of ranks.
absl::Status all_reduce(Communicator& communicator, const std::string& name,
                        std::vector<double>& values, absl::Duration timeout);

}  // namespace tapeline
