// Changes valid schedules at random, and compares what the validator says with
// what happens.
#pragma once

#include <cstdint>
#include <map>
#include <ostream>
#include <string>

#include "dist/pipeline/schedule.h"

namespace tapeline {

// One of: swap two actions, move one within its rank or to another, change a
// stage, a micro-batch or a kind, split B, join I and W, fuse a pair, unfuse
// one, drop one, duplicate one.
Schedule mutate(const Schedule& schedule, uint64_t seed);

struct FuzzCounts {
  int64_t cases = 0, accepted = 0;
  // Accepted mutants that run some pass before one that it came after.
  int64_t accepted_reordered = 0;
  std::map<std::string, int64_t> rejected;  // by check
  // Faults: accepted, but hung, with other gradients or beyond its memory;
  // rejected, but right.
  int64_t hung = 0, wrong_gradients = 0, over_budget = 0, rejected_but_ran = 0;
};

// Each fault is shown on `log` with its schedule.
FuzzCounts fuzz_schedules(int64_t cases, uint64_t seed, std::ostream& log);

}  // namespace tapeline
