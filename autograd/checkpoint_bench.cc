// What a checkpoint costs besides what it runs.
//
//   bazel run //autograd:checkpoint_bench -- --benchmark_format=json
//
//   boundary/N   the identity over a vector of N tensors of one element that
//                require grad: the call, its node and the node's release with
//                the tape; no backward
//
// The counter `ns` is nanoseconds of processor time per boundary, from the
// fastest of the repetitions: other programs only ever add time. The goal is
// 1,000 + 50 N.
#include <time.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "autograd/checkpoint.h"
#include "autograd/tape.h"
#include "benchmark/benchmark.h"
#include "runtime/check.h"
#include "runtime/tensor.h"

namespace tapeline {
namespace {

double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
}

struct Identity {
  std::vector<Tensor> operator()(const std::vector<Tensor>& in) const {
    return in;
  }
};

void boundary(benchmark::State& state) {
  constexpr int kCalls = 200;
  const Identity identity;
  double least = 1e30;
  for (auto _ : state) {
    auto tape = std::make_unique<Tape>();
    std::vector<Tensor> leaves;
    for (int64_t i = 0; i < state.range(0); ++i) {
      leaves.push_back(tape->input(Tensor::full({1}, DType::kF32, 1)));
    }
    const double begin = now();
    record(*tape, [&] {
      for (int i = 0; i < kCalls; ++i) {
        benchmark::DoNotOptimize(checkpoint(true, identity, leaves));
      }
      return 0;
    });
    CHECK_EQ(tape->nodes(), kCalls);
    tape.reset();
    const double spent = now() - begin;
    least = std::min(least, spent / kCalls);
  }
  state.counters["ns"] = least;
  state.counters["goal"] = 1000.0 + 50.0 * static_cast<double>(state.range(0));
}
BENCHMARK(boundary)->Arg(1)->Arg(4)->Arg(16)->Arg(64);

}  // namespace
}  // namespace tapeline

BENCHMARK_MAIN();
