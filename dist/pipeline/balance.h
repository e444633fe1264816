// Cuts a model of measured parts into the stages of a schedule, so that no rank
// has more to do than need be.
//
// A step takes at least as long as its busiest rank, and a rank may have
// several stages, so loads count, not stages. How loads lie over a rank's
// stages decides how long the pipeline takes to fill: among cuts whose busiest
// rank is about the same the most even one is taken.
#pragma once

#include <cstddef>
#include <vector>

#include "dist/pipeline/layout.h"

namespace tapeline {

inline constexpr size_t kMostBalancedStages = 256, kMostBalancedParts = 1024;

struct Cut {
  std::vector<size_t> ends;  // stage k has the parts before ends[k]
  double busiest = 0;        // time of the rank that has most
};

struct BalancedCut {
  Cut cut;
  double least = 0;  // time of the busiest rank of the best cut found
  // The search went through all cuts, so there is none better. Else it gave up
  // at a number of steps, not at a time: the same call gives the same cut.
  bool proven = false;
};

// Stages may be empty. Of all cuts whose busiest rank takes at most (1 + slack)
// times `least` the one with the least sum of squares of stage times. The time
// of a part is that of all its passes for a micro-batch. At most
// kMostBalanced*.
BalancedCut balanced_cut(const std::vector<double>& times,
                         const std::vector<int>& placement, double slack);

// The time of the rank that has most.
double busiest_rank(const std::vector<double>& times,
                    const std::vector<int>& placement,
                    const std::vector<size_t>& ends);

// Stages of `parts` joined.
Layout joined(const Layout& parts, const std::vector<size_t>& ends);

}  // namespace tapeline
