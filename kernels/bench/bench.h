// One kernel's time alone: a table runner that all benchmarks share.
//
// A <op>_bench.cc registers its ops; the main of this package runs them:
//
//   bazel run //kernels/rms_norm:bench -- --shape=8192x4096 --threads=2
//
//   --shape=AxB   one shape instead of the op's list
//   --op=NAME     one op of several (a bare NAME names an op or its kernel)
//   --device=cpu  where; --threads=N shares a CPU launch (default 1)
//   --dtype=f32|bf16|f64
//   --json        one JSON object per row on stdout, nothing else
//   --baseline=F  joins rows of a baseline file measured on the same device
//   --profile_once  one warm-up and one launch, for a profiler
//
// A row is timed in bursts of at least 10 ms: `us` is the median of seven,
// `us_min` the least, `us_processor` the least time of all processors per
// launch, which other programs on the machine disturb less. The output of the
// timed launches is compared on sampled rows with a plain loop; a row that
// fails ends the run with exit code 1. Usage errors are 64, unreadable files 2.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "kernels/kernel.h"
#include "runtime/dtype.h"
#include "runtime/view.h"

namespace tapeline::bench {

// Compares sampled rows; the tolerance is that of tests/support/close.h.
class Verifier {
 public:
  // got [D] against values computed in f64 from the same inputs, sum_length
  // being the terms added behind each.
  template <class T>
  void row(View<const T> got, const std::vector<double>& expected,
           int64_t sum_length = 1);

  bool ok() const { return rows_ > 0 && failures_.empty(); }
  // Largest |got - expected| over the root mean square of its row.
  double max_err() const { return max_err_; }
  const std::string& failures() const { return failures_; }

 private:
  int64_t rows_ = 0;
  double max_err_ = 0;
  std::string failures_;
};

// One shape, ready to launch. The closures own their buffers.
struct Run {
  std::function<void()> launch;
  Cost cost;
  // Called after the timed launches.
  std::function<void(Verifier&)> verify;
};

struct Arguments {
  std::vector<int64_t> dims;  // in the order of the op's keys
  DType dtype = DType::kF32;
  Launch launch;
};

struct Op {
  std::string kernel;             // its folder: rms_norm
  std::string name;               // as in tables of baselines: rmsnorm_fwd
  std::vector<std::string> keys;  // what --shape's numbers are: T, H
  std::vector<std::vector<int64_t>> shapes;  // run without --shape
  Run (*make)(const Arguments&);
};

// Registers an op, at namespace scope: const bool added = bench::add({...}).
bool add(Op op);

// Runs what the arguments ask for and returns the exit code.
int run(int argc, char** argv, std::ostream& out, std::ostream& err);

// Standard normal values on the bf16 grid, the same for the same seed.
template <class T>
std::vector<T> normal(int64_t n, uint32_t seed);

// Up to eight rows of n: the first, the last and some between.
std::vector<int64_t> sampled_rows(int64_t n);

}  // namespace tapeline::bench
