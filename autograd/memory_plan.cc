#include "autograd/memory_plan.h"

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
    PlannedWindow window{call.layer, static_cast<int>(windows.size()) - 1};
    window.activations = choice.activations && call.activation_bytes > 0;
    window.ids = choice.ids && call.ids_bytes > 0 && last_consumer &&
                 call.source != call.layer;
    if (!window.activations && !window.ids) continue;
    window.bytes = (window.activations ? call.activation_bytes : 0) +
                   (window.ids ? call.ids_bytes : 0);
    if (!windows.empty()) windows.back().copied = true;
    windows.push_back(window);
  }
  return windows;
}

int64_t planned_bytes(const std::vector<PlannedWindow>& windows) {
  int64_t bytes = 0;
  for (const PlannedWindow& window : windows) {
    if (window.copied) bytes += window.bytes;
  }
  return bytes;
}

}  // namespace tapeline
