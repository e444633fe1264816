#include "autograd/anomaly.h"

#include <cmath>

#include "autograd/anomaly_recorder.h"
#include "autograd/checkpoint.h"
#include "autograd/mode.h"
#include "runtime/access.h"

namespace tapeline {

AnomalyScope::AnomalyScope() : current_(internal::anomaly_scope, this) {}

std::string to_string(const Anomaly& a) {
  return a.value + " in " + a.phase + " of " + a.op + " at " +
         (a.layer.empty() ? "top level" : a.layer) + ", tensor " +
         std::to_string(a.tensor) + ", element " + std::to_string(a.element);
}

struct AnomalyRecorder {
  static AnomalyScope* scope() { return internal::anomaly_scope; }
  static bool wants() { return scope() != nullptr && !scope()->first_; }
  static void keep(Anomaly anomaly) { scope()->first_ = std::move(anomaly); }
  static std::vector<Tensor>& sums() { return scope()->sums_; }
};

namespace internal {

bool anomaly_on() { return AnomalyRecorder::wants(); }

void check_finite(const char* op, uint32_t scope, const char* phase, int index,
                  const Tensor& tensor) {
  if (!AnomalyRecorder::wants() || !tensor || !is_float(tensor.dtype())) return;
  dispatch_float(tensor.dtype(), [&]<class T>() {
    const std::vector<T> values = tensor.to_vector<T>();
    for (size_t i = 0; i < values.size(); ++i) {
      const double value = static_cast<double>(values[i]);
      if (std::isfinite(value)) continue;
      AnomalyRecorder::keep({op, layer_path(scope), phase, index,
                             static_cast<int64_t>(i),
                             std::isnan(value) ? "nan"
                             : value > 0       ? "inf"
                                               : "-inf"});
      return;
    }
  });
}

void check_outputs(const char* op, absl::Span<Tensor* const> outputs) {
  if (!AnomalyRecorder::wants()) return;
  const char* phase_name = phase() == Phase::kReplay ? "replay" : "forward";
  for (size_t i = 0; i < outputs.size(); ++i) {
    check_finite(op, layer_scope(), phase_name, static_cast<int>(i),
                 *outputs[i]);
  }
}

void note_sum(const Tensor& sum) {
  if (AnomalyRecorder::wants()) AnomalyRecorder::sums().push_back(sum);
}

void check_sums(const char* op, uint32_t scope) {
  if (!AnomalyRecorder::wants()) return;
  int i = 0;
  for (const Tensor& sum : std::exchange(AnomalyRecorder::sums(), {})) {
    check_finite(op, scope, "weight gradient", i++, sum);
  }
}

}  // namespace internal
}  // namespace tapeline
