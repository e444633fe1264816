#include "tools/train/offload_timing.h"

#include <algorithm>
#include <cstddef>

#include "runtime/check.h"

namespace tapeline {
namespace {

constexpr double kNew = 0.3;  // weight of the newest pass

void average(double& mean, double value) {
  mean = mean == 0 ? value : (1 - kNew) * mean + kNew * value;
}

}  // namespace

std::vector<bool> layers_that_hide(const std::vector<PlannedWindow>& windows,
                                   const std::vector<double>& seconds,
                                   double bytes_per_second) {
  CHECK_EQ(windows.size(), seconds.size());
  size_t hidden = 0;
  double idle = 0;  // when the copy stream is
  for (const PlannedWindow& window : windows) {
    idle = std::max(idle, seconds[hidden]) +
           static_cast<double>(window.bytes) / bytes_per_second;
    if (idle > seconds.back()) break;
    ++hidden;
  }
  // The window behind them loads the last of them.
  if (hidden > 0 && hidden < windows.size()) ++hidden;
  std::vector<bool> layers(1);
  for (size_t i = 0; i < hidden; ++i) {
    layers.resize(static_cast<size_t>(windows[i].layer) + 1);
    layers.back() = true;
  }
  return layers;
}

void OffloadTiming::add(const OffloadGraph& graph) {
  const OffloadCounters& c = graph.counters();
  if (c.exposed_seconds > 0) {
    average(rate_, static_cast<double>(c.copied_bytes + c.loaded_bytes) /
                       c.exposed_seconds);
  }
  windows_ = graph.plan();
  const std::vector<double>& closed = graph.closed_seconds();
  closed_.resize(closed.size());
  for (size_t i = 0; i < closed.size(); ++i) average(closed_[i], closed[i]);
}

std::vector<bool> OffloadTiming::layers_that_hide() const {
  if (rate_ == 0 || closed_.size() != windows_.size() || windows_.empty()) {
    return {};
  }
  return tapeline::layers_that_hide(windows_, closed_, rate_);
}

}  // namespace tapeline
