#include "autograd/memory_plan.h"

#include <algorithm>

#include "runtime/check.h"

namespace tapeline {

std::vector<int> selection_sources(const std::vector<bool>& owns_indexer) {
  std::vector<int> sources;
  for (size_t i = 0; i < owns_indexer.size(); ++i) {
    CHECK(owns_indexer[i] || i > 0)
        << "layer 0 shares a selection, but none was made before it";
    sources.push_back(owns_indexer[i] ? static_cast<int>(i) : sources.back());
  }
  return sources;
}

std::vector<PlannedWindow> plan_windows(const std::vector<LayerCall>& calls,
                                        const OffloadChoice& choice) {
  std::vector<PlannedWindow> windows;
  for (size_t i = 0; i < calls.size(); ++i) {
    const LayerCall& call = calls[i];
    const auto layer = static_cast<size_t>(call.layer);
    if (!choice.layers.empty() &&
        (layer >= choice.layers.size() || !choice.layers[layer])) {
      continue;
    }
    const bool last_consumer =
        i + 1 == calls.size() || calls[i + 1].source != call.source;
    PlannedWindow window;
    window.layer = call.layer;
    window.activations = choice.activations && call.activation_bytes > 0;
    window.ids = choice.ids && call.ids_bytes > 0 && last_consumer &&
                 call.source != call.layer;
    if (!window.activations && !window.ids) continue;
    window.predecessor = static_cast<int>(windows.size()) - 1;
    window.bytes = (window.activations ? call.activation_bytes : 0) +
                   (window.ids ? call.ids_bytes : 0);
    windows.push_back(window);
  }
  for (size_t i = 0; i + 1 < windows.size(); ++i) windows[i].copied = true;
  return windows;
}

int64_t planned_bytes(const std::vector<PlannedWindow>& windows) {
  int64_t bytes = 0;
  for (const PlannedWindow& window : windows) {
    if (window.copied) bytes += window.bytes;
  }
  return bytes;
}

std::vector<bool> layers_that_hide(const std::vector<PlannedWindow>& windows,
                                   const std::vector<double>& seconds,
                                   double bytes_per_second) {
  CHECK_EQ(windows.size(), seconds.size());
  std::vector<bool> layers;
  double idle = 0;  // when the copy stream is
  for (size_t i = 0; i < windows.size(); ++i) {
    idle = std::max(idle, seconds[i]) +
           static_cast<double>(windows[i].bytes) / bytes_per_second;
    if (idle > seconds.back()) break;
    layers.resize(static_cast<size_t>(windows[i].layer) + 1);
    layers[static_cast<size_t>(windows[i].layer)] = true;
  }
  // The window behind them loads the last of them.
  const size_t next =
      static_cast<size_t>(std::count(layers.begin(), layers.end(), true));
  if (next > 0 && next < windows.size()) {
    layers.resize(static_cast<size_t>(windows[next].layer) + 1);
    layers[static_cast<size_t>(windows[next].layer)] = true;
  }
  if (layers.empty()) layers.assign(1, false);
  return layers;
}

}  // namespace tapeline
