// Offload: saved tensors wait for their backward in pinned host memory.
//
//   OffloadWindow window(ctx.offload, layer, {x.hidden_TD}, {ids_TK});
//   x = checkpoint(policy, layer, x, ctx);
//
// A window is the scope of one layer call; the call lists tensors, the plan
// (memory_plan.h) decides. What of the list is saved while the scope is open
// is copied out, once for each storage however often and through whatever views
// it is saved; parameters and empty tensors stay. Its bytes leave the device
// when the next window of the pass closes, one layer later, so that the copy
// has a layer's time. Backward brings a window's bytes back while the window
// behind it is in use. int32 ids and activations share streams and pinned
// memory (device.h). Nothing here waits on the host (storage.h says how moves
// are ordered).
//
// A graph is one forward pass with its windows; several may be in flight, in
// any order. It outlives the tape recorded under it. Windows inside a
// checkpoint's replay, or where nothing is recorded, do nothing.
// When the pinned pool is at its cap the bytes stay on the device, counted.
// Strict: a reload that was not planned is a CHECK, and status() is an error
// unless exactly the planned bytes were moved. One thread per graph.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "autograd/memory_plan.h"
#include "autograd/saved_tensor.h"
#include "runtime/tensor.h"

namespace tapeline {

struct OffloadCounters {
  int64_t windows = 0;         // opened
  int64_t copies = 0;          // of storages to the host
  int64_t copied_bytes = 0;    // to the host
  int64_t loaded_bytes = 0;    // back
  int64_t repeated = 0;        // saves of a storage that is copied already
  int64_t prefetched = 0;      // windows brought back before they were used
  int64_t late = 0;            // windows brought back when they were used
  int64_t cancelled = 0;       // storages wanted again before they had left
  int64_t refused_bytes = 0;   // left on the device by the pinned pool's cap
  double exposed_seconds = 0;  // of the caller's, spent in moves
  OffloadCounters& operator+=(const OffloadCounters& other);
};

class OffloadGraph {
 public:
  OffloadGraph(std::vector<PlannedWindow> plan, bool strict)
      : plan_(std::move(plan)), strict_(strict) {}
  OffloadGraph(const OffloadGraph&) = delete;
  OffloadGraph& operator=(const OffloadGraph&) = delete;

  const std::vector<PlannedWindow>& plan() const { return plan_; }
  const OffloadCounters& counters() const { return counters_; }
  // When each window closed, from the first one's beginning on.
  const std::vector<double>& closed_seconds() const { return closed_; }
  // After backward. Strict: were the planned bytes moved out and back?
  absl::Status status() const;

 private:
  friend class OffloadWindow;
  class Window;

  const std::vector<PlannedWindow> plan_;
  const bool strict_;
  std::vector<std::shared_ptr<Window>> windows_;
  std::vector<double> closed_;
  double began_ = 0;
  OffloadCounters counters_;
};

class OffloadWindow {
 public:
  OffloadWindow(OffloadGraph* graph, int layer,
                const std::vector<Tensor>& activations,
                const std::vector<Tensor>& ids);
  ~OffloadWindow();

 private:
  OffloadGraph* graph_;
  std::optional<HookScope> hooks_;  // of the window, if there is one
};

}  // namespace tapeline
