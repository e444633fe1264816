// What a benchmark is asked to do: the flags of bench.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/dtype.h"

namespace tapeline::bench {

struct Options {
  std::vector<int64_t> shape;
  std::string op, baseline, device;
  std::optional<DType> dtype;
  int threads = 1;
  bool all = false, list = false, json = false, profile_once = false;
};

// Fills `options` or says what is wrong.
std::string parse(int argc, char** argv, Options& options);

}  // namespace tapeline::bench
