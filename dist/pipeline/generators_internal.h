// The families of generators.h. Sizes have been checked.
#pragma once

#include "dist/pipeline/schedule.h"

namespace tapeline::internal {

// What tells the schedules of loop placement apart.
struct LoopRule {
  bool all_forwards_first = false;
  int warm_up_per_hop = 0;  // forward passes more for each rank further up
  bool split = false;       // I and W apart
  int delay_per_rank = 0;   // W's held back on rank r: r times this
};
Schedule loop_schedule(const LoopRule& rule, int ranks, int chunks,
                       int micro_batches, int group);

Schedule zbv(int ranks, int micro_batches);
Schedule dualpipev(int ranks, int micro_batches);
// A micro-batch moves on by one rank every 1 or 2 passes. `limit`: most
// activations of one stage that a rank keeps.
Schedule v_memory(int ranks, int micro_batches, bool half, int limit);

}  // namespace tapeline::internal
