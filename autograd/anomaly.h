// NaN localisation: where the first non-finite value appeared.
//
// Off by default; while on (per thread, scoped) the outputs of every op and
// every gradient it makes or adds to are checked, and the first hit is kept:
// op, layer path, phase and element. The run goes on; the caller asks
// afterwards.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "autograd/mode.h"
#include "runtime/tensor.h"

namespace tapeline {

struct Anomaly {
  std::string op;
  std::string layer;  // layers.3.mlp
  std::string phase;  // "forward", "replay", "backward", "weight gradient"
  int tensor = 0;     // number of the output, input or parameter
  int64_t element = 0;
  std::string value;  // "nan", "inf", "-inf"
};
std::string to_string(const Anomaly& anomaly);

class AnomalyScope {
 public:
  AnomalyScope();

  const std::optional<Anomaly>& first() const { return first_; }

 private:
  friend struct AnomalyRecorder;
  std::optional<Anomaly> first_;
  std::vector<Tensor> sums_;  // that the running W part adds to
  internal::Scoped<AnomalyScope*> current_;
};

}  // namespace tapeline
