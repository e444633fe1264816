// One kernel's time alone: a table runner that all benchmarks share.
//
// A <op>_bench.cc registers its ops; the main of this package runs them:
//
//   bazel run //kernels/rms_norm:bench -- --shape=8192x4096 --threads=2
//
//   NAME, --op=NAME  one op, or those of one kernel; without it, or with
//                    --all, everything that is registered
//                    and takes --shape and --dtype; what is left out is said
//   --shape=AxB   one shape instead of the op's list
//   --list        names and shapes, one command per line; runs nothing
//   --device=cpu|cuda  where; without it the GPU, if there is one
//   --threads=N   share a CPU launch (default 1)
//   --dtype=f32|bf16|f64  default: f32 on the CPU; on a GPU what the op is
//                    trained in there
//   --json        one JSON object per row on stdout, nothing else
//   --baseline=F  joins rows of a baseline file measured on the same device
//   --profile_once  one warm-up and one launch, between the calls that a
//                    profiler waits for (ncu --profile-from-start off)
//
// A row is timed in bursts of at least 10 ms: `us` is the median of seven,
// `us_min` the least. On the CPU `us_processor` is the least time of all
// processors per launch, which other programs on the machine disturb less. On a
// GPU times are those of events. A burst is queued behind a kernel that keeps
// the stream busy, so the host's time does not show, and after a pause, so that
// the card has its full clock whatever ran before; launches take turns over
// sets of inputs that are together larger than the L2 (`rotated_bytes`).
//
// Ceilings are measured in the same run, before the first row: a copy of 2 GiB
// (`ceiling_gbps`, bytes read and written) and a bf16 product by cuBLASLt of
// 8192^3; a grouped product has the same product over one group beside it, and
// the faster of the two counts (`ceiling_tflops`). `floor_us` is what work and
// bytes would take at these, `pct_ceiling` 100 floor_us / us.
//
// The output of the last timed launch is compared on sampled rows with a plain
// loop in f64 on the host (ops that work in place or add to their output are
// launched again, from values that are known); a row that fails makes the exit
// code 1. The bounds are those of rows of real sizes: shorter than some
// hundred elements, which cancel or round all one way, right ones can miss
// them. Usage errors are 64; unreadable files, and a GPU that is not there, 2;
// more memory than there is, 70. The commit is git's, or TAPELINE_COMMIT where
// there is no repository.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <ostream>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/bench/array.h"
#include "kernels/kernel.h"
#include "runtime/dtype.h"
#include "runtime/view.h"

namespace tapeline::bench {

// Compares sampled rows; the tolerance is that of tests/support/close.h.
class Verifier {
 public:
  // got [D] against values computed in f64 from the same inputs, sum_length
  // being the terms added behind each, and scale as in close.h.
  template <class T>
  void row(View<const T> got, const std::vector<double>& expected,
           int64_t sum_length = 1, double scale = 1);

  bool ok() const { return rows_ > 0 && failures_.empty(); }
  // Largest |got - expected| over the root mean square of its row.
  double max_err() const { return max_err_; }
  // What is wrong, of the first row that is.
  std::string failures() const;

 private:
  int64_t rows_ = 0;
  double max_err_ = 0;
  std::string failures_;
};

// The one product that would be the same work: y[m, n] = x[m, k] w[n, k]^T.
struct Product {
  int64_t m = 0, n = 0, k = 0;
};

// One shape, ready to launch. The closures own their buffers.
struct Run {
  std::function<void()> launch;
  Cost cost;
  // Called after the timed launches.
  std::function<void(Verifier&)> verify;
  Product same_product = {};
  bool on_device = true;  // false: bound by a link, which has no ceiling here
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
  // Those of real models, run on a GPU without --shape.
  std::vector<std::vector<int64_t>> gpu_shapes = {};
  DType gpu_dtype = DType::kBf16;
  std::string may_be_zero = "";  // a key; others are at least 1
};

// What an op asks of --dtype and --shape, beside whole numbers of at least 1.
struct Limits {
  std::vector<DType> dtypes = {DType::kF32, DType::kBf16, DType::kF64};
  // A rule that these numbers break, as "k is at most T"; or nothing.
  std::string (*broken)(const std::vector<int64_t>& dims) = nullptr;
};

// Rules: what is said of one that is broken, else nothing.
inline std::string at_most(int64_t most, const std::string& key,
                           int64_t value) {
  return value <= most ? "" : key + " is at most " + std::to_string(most);
}
inline std::string multiple(const std::string& of_key, int64_t of,
                            const std::string& key, int64_t value) {
  return of == 0 || value % of == 0 ? "" : key + " is a multiple of " + of_key;
}
// Of several.
inline std::string first_broken(std::initializer_list<std::string> rules) {
  for (const std::string& rule : rules) {
    if (!rule.empty()) return rule;
  }
  return "";
}

// Registers an op, at namespace scope: const bool added = bench::add({...}).
bool add(Op op, Limits limits = {});

// Runs what the arguments ask for and returns the exit code.
int run(int argc, char** argv, std::ostream& out, std::ostream& err);

// The same as a process of its own, on stdout and stderr: where memory ends, so
// does the process.
int run_process(int argc, char** argv);

// For ops that add to `sums`: rounding over all timed launches grows with their
// number, which is the machine's, so the same launch runs again from zeros. And
// twice: whoever overwrites instead of adding is found out.
inline constexpr int kSums = 2;
template <class Launch, class... T>
void launch_from_zeros(const Launch& launch, Array<T>&... sums) {
  (sums.zero(), ...);
  for (int i = 0; i < kSums; ++i) launch();
}

// Up to `count` rows of n: the first, the last and some between.
std::vector<int64_t> sampled_rows(int64_t n, int64_t count = 8);

// Sum lengths for what is not a chain of rounded additions, in the terms of
// tests/support/close.h, where n additions are off by sqrt(n) roundings of
// Accumulator<T>.
//
// On tensor cores probabilities are rounded to T before they are multiplied and
// added: each term is off by half a rounding of T, of random sign, and so is
// the sum: for bf16 2^15 roundings of float.
template <class T>
constexpr int64_t rounded_terms() {
  return std::is_same_v<T, bf16> ? int64_t{1} << 30 : 0;
}
// Tensor cores cut off what they add to a sum instead of rounding it, so errors
// of n terms, 16 at a time, have one sign and add up.
constexpr int64_t cut_terms(int64_t n) {
  return std::max(n, (n / 16) * (n / 16));
}

// The values of row `i` of x [_, d] at `columns`, and the rows' of a sampled
// result: what is too long to be computed again whole.
template <class T>
std::vector<T> at_columns(const Array<T>& x, int64_t i, int64_t d,
                          const std::vector<int64_t>& columns) {
  std::vector<T> out;
  for (int64_t j : columns) out.push_back(x[i * d + j]);
  return out;
}

}  // namespace tapeline::bench
