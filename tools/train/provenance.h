// What made a run: enough to make it again.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/json.h"

namespace tapeline {

// command line, seed, compiler and flags, commit of the sources where the build
// or a surrounding git checkout tells it, host, processors, memory.
// No environment variables: they hold secrets.
Json provenance(const std::vector<std::string>& command_line, uint64_t seed,
                int threads);

}  // namespace tapeline
