// What a rank keeps for the micro-batches that it has under way.
#pragma once

#include <vector>

#include "dist/pipeline/schedule.h"

namespace tapeline {

// One stage's memory for one micro-batch, in any unit. From F to the end of I
// or B `forward`, or `parked` where F is recomputed or offloaded: such a pass
// has `forward` only while its I or B runs. From the end of I to the end of W
// `stash`.
struct Holds {
  double forward = 1, parked = 0, stash = 1;
};

struct Peak {
  double value = 0;
  int index = -1;  // of the first action during or after which it is reached
};

// By rank. `holds` has one entry for all stages, or one each. The schedule must
// be valid.
std::vector<Peak> peaks(const Schedule& schedule,
                        const std::vector<Holds>& holds);

}  // namespace tapeline
