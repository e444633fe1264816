// What made a run: enough to make it again.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/json.h"

namespace tapeline {

// command line, seed, compiler and flags, commit of a surrounding git checkout
// or else TAPELINE_COMMIT, host, processors, memory; of the current device, if
// it is a GPU, name, UUID and the CUDA that its driver serves. No other
// environment variables: they hold secrets.
Json provenance(const std::vector<std::string>& command_line, uint64_t seed,
                int threads);

}  // namespace tapeline
