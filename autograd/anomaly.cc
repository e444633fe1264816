#include "autograd/anomaly.h"

#include <cmath>

#include "autograd/anomaly_recorder.h"
#include "autograd/mode.h"
#include "runtime/access.h"

namespace tapeline {
namespace {

thread_local AnomalyScope* current = nullptr;

}  // namespace

AnomalyScope::AnomalyScope() : previous_(current) { current = this; }
AnomalyScope::~AnomalyScope() { current = previous_; }

std::string to_string(const Anomaly& a) {
  return a.value + " in " + a.phase + " of " + a.op + " at " +
         (a.layer.empty() ? "top level" : a.layer) + ", tensor " +
         std::to_string(a.tensor) + ", element " + std::to_string(a.element);
}

struct AnomalyRecorder {
  static bool wants() { return current != nullptr && !current->first_; }
  static void keep(Anomaly anomaly) { current->first_ = std::move(anomaly); }
};

namespace internal {

bool anomaly_on() { return AnomalyRecorder::wants(); }

void check_finite(const char* op, uint32_t scope, const char* phase, int index,
                  const Tensor& tensor) {
  if (!AnomalyRecorder::wants() || !tensor || !is_float(tensor.dtype())) return;
  const Tensor whole = tensor.contiguous() ? tensor : tensor.clone();
  dispatch_float(whole.dtype(), [&]<class T>() {
    auto bytes = read<T>(whole);
    const T* data = bytes.view().data;
    for (int64_t i = 0; i < whole.elements(); ++i) {
      const double value = static_cast<double>(data[i]);
      if (std::isfinite(value)) continue;
      AnomalyRecorder::keep({op, layer_path(scope), phase, index, i,
                             std::isnan(value) ? "nan"
                             : value > 0       ? "inf"
                                               : "-inf"});
      return;
    }
  });
}

}  // namespace internal
}  // namespace tapeline
