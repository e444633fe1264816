// A golden file, read whole: its batch, its values, its kind.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/batch.h"
#include "runtime/json.h"
#include "tools/parity/values.h"

namespace tapeline {

struct Golden {
  std::string path, kind;
  Json meta;  // empty object where there is no meta.json
  NamedValues values;
  std::vector<std::string> inputs;  // names
  HostBatch batch;
  int mtp_depths = 0;
  bool mtp_after_norm = false;
  double mtp_weight = 0.1;  // of the mean over depths
  double router_bias_rate = 1e-3;

  bool has(const std::string& name) const { return values.contains(name); }
};

// Inputs that contradict each other are an error that names them.
absl::StatusOr<Golden> read_golden(const std::string& path);

}  // namespace tapeline
