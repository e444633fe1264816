// Timelines of simulated schedules.
#pragma once

#include <string>

#include "dist/pipeline/schedule.h"
#include "dist/pipeline/simulator.h"

namespace tapeline {

// One line a rank, to scale: each action begins in the column of its time and
// fills its columns, dots are idle time. With names, "rank 0 |0F0 0F1 ....0B0
// ", where they fit into `columns`; otherwise letters of the kinds (O for OV),
// a column for the shortest action; where that is too long, the whole in
// `columns`.
std::string ascii_timeline(const Schedule& schedule,
                           const Simulation& simulation, int columns = 200);

// A picture of its own: one row a rank, boxes coloured by kind and shaded by
// stage, a time axis, the name of an action where it fits and as a tooltip.
std::string svg_timeline(const Schedule& schedule,
                         const Simulation& simulation);

}  // namespace tapeline
