// MemoryPlan: which offload windows a forward pass has. Pure functions: no
// streams, no memory.
//
// A layer call lists what it could send to the host: its input, and the DSA
// selection that it uses. A window exists where the settings leave something
// of that list; windows are numbered densely from 0, in call order, for each
// forward pass by itself, and know their predecessor, which is loaded while
// they are in use. A selection leaves in the window of its last consumer alone
// (an earlier one would take it from the next), and not where that is the layer
// that made it. The last window is never copied: it would be wanted back at
// once.
// Source: contracts C26-C37 of docs/checkpoint_and_offload.md.
#pragma once

#include <cstdint>
#include <vector>

namespace tapeline {

// For each layer, the layer whose selection it uses: itself where it owns an
// indexer, else the nearest owner before it. CHECKs that there is one.
std::vector<int> selection_sources(const std::vector<bool>& owns_indexer);

struct LayerCall {
  int layer = 0;                 // global
  int64_t activation_bytes = 0;  // of its input
  int64_t ids_bytes = 0;         // of the selection that it uses; 0: none
  int source = -1;               // the layer that made the selection
};

struct OffloadChoice {
  bool activations = false, ids = false;
  std::vector<bool> layers;  // by global layer; empty: all
};

struct PlannedWindow {
  int layer = 0;
  int predecessor = -1;  // the window that is loaded meanwhile; -1: none
  bool activations = false, ids = false;
  bool copied = false;
  int64_t bytes = 0;  // of the tensors it lists
};

std::vector<PlannedWindow> plan_windows(const std::vector<LayerCall>& calls,
                                        const OffloadChoice& choice);
int64_t planned_bytes(const std::vector<PlannedWindow>& windows);

}  // namespace tapeline
