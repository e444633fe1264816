// Timelines of simulated schedules.
#pragma once

#include <string>

#include "dist/pipeline/schedule.h"
#include "dist/pipeline/simulator.h"

namespace tapeline {

// One line a rank, "rank 0 | 0F0 0F1 . . 0B0 …", to scale: each action begins
// in the column of its time and fills its columns, dots are idle time. The
// scale is the coarsest that shows every action's name in at most `columns`;
// where none does, kinds alone are drawn, and actions that are too short for a
// column vanish.
std::string ascii_timeline(const Schedule& schedule,
                           const Simulation& simulation, int columns = 200);

// A picture of its own: one row a rank, boxes coloured by kind and shaded by
// stage, a time axis, the name of an action where it fits and as a tooltip.
std::string svg_timeline(const Schedule& schedule,
                         const Simulation& simulation);

}  // namespace tapeline
