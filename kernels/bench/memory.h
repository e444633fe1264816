// Where memory ends: one line and an exit code instead of an abort or a kill.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

namespace tapeline::bench {

inline constexpr int kOutOfMemory = 70;

// Whether the elements of a large array, of three extents at most, still have
// a number.
bool countable(std::vector<int64_t> shape);

// Beyond what the machine has free now, the system would promise memory first
// and kill the process as it is touched: makes it refuse instead. Not for a
// GPU, whose driver reserves addresses without end.
void limit_memory();

// Says it in one line and returns kOutOfMemory.
int fail_for_memory(const std::string& what, std::ostream& err);

// What is refused from now on ends the process so, on stderr.
void end_where_memory_does();

}  // namespace tapeline::bench
