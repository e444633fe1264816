// How long launches take, on either device, and the ceilings of a GPU.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/bench/bench.h"

namespace tapeline::bench {

inline constexpr int kBursts = 7;

// Seconds per launch: of the clock and of the processors.
struct Seconds {
  double wall = 0, processor = 0;
  bool operator<(const Seconds& other) const { return wall < other.wall; }
};

// The launches of all sets of inputs by turns.
struct Turns {
  std::vector<Run> runs;
  size_t next = 0;

  // Of the last launch so far.
  const Run& last() const {
    return runs[(next + runs.size() - 1) % runs.size()];
  }
  void launch() {
    runs[next].launch();
    next = (next + 1) % runs.size();
  }
};

// Bursts by rising wall time.
std::vector<Seconds> time_bursts(Launch l, Turns& turns);

// One launch, after one that warms up, between the calls that a profiler waits
// for.
std::vector<Seconds> time_once(Launch l, Turns& turns);

// On a GPU: bf16 by cuBLASLt, and bytes read and written by a copy.
double product_tflops(Launch l, const Product& p);
double copy_gbps(Launch l);

}  // namespace tapeline::bench
