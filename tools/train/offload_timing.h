// What the first steps of a run tell about copies: how fast they are, and when
// each window of a forward pass closes. Averages that forget: later passes
// count more. From them the windows whose copies hide behind the work.
#pragma once

#include <vector>

#include "autograd/memory_plan.h"
#include "autograd/offload.h"

namespace tapeline {

// By global layer: windows from the first on whose copies, one after the other,
// end before the forward pass does. seconds[i] is when window i closes, the
// last one's is the end.
std::vector<bool> layers_that_hide(const std::vector<PlannedWindow>& windows,
                                   const std::vector<double>& seconds,
                                   double bytes_per_second);

class OffloadTiming {
 public:
  // Of a pass with all windows: a choice among some says nothing of the rest.
  void add(const OffloadGraph& graph);
  double bytes_per_second() const { return rate_; }
  // Of the passes seen; all layers (empty) where they tell nothing.
  std::vector<bool> layers_that_hide() const;

 private:
  double rate_ = 0;
  std::vector<PlannedWindow> windows_;
  std::vector<double> closed_;  // seconds from the first window's beginning
};

}  // namespace tapeline
