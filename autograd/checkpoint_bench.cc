// What a checkpoint costs besides what it runs.
//
//   bazel run //autograd:checkpoint_bench -- --benchmark_format=json
//
//   boundary/N   a function that passes N tensors of one element on, one op
//                each that computes nothing: the call, its node and the node's
//                release with the tape; no backward
//
// The counter `ns` is nanoseconds of processor time per boundary, without what
// the function itself takes outside of a checkpoint (`function_ns`), from the
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

struct IdentityNode : Node {
  void backward_inputs(Backward& b) override { b.add(0, b.grad()); }
};

struct Identity {
  std::vector<Tensor> operator()(const std::vector<Tensor>& in) const {
    std::vector<Tensor> out;
    out.reserve(in.size());
    for (const Tensor& x : in) {
      out.push_back(x.detach());
      push<IdentityNode>("identity", {&x}, {&out.back()});
    }
    return out;
  }
};

constexpr int kCalls = 200;

// Nanoseconds of a call, `nodes` of which are on the tape at the end.
template <class Call>
double spent(int64_t count, int64_t nodes, const Call& call) {
  auto tape = std::make_unique<Tape>();
  std::vector<Tensor> leaves;
  for (int64_t i = 0; i < count; ++i) {
    leaves.push_back(tape->input(Tensor::full({1}, DType::kF32, 1)));
  }
  const double begin = now();
  record(*tape, [&] {
    for (int i = 0; i < kCalls; ++i) benchmark::DoNotOptimize(call(leaves));
    return 0;
  });
  CHECK_EQ(tape->nodes(), kCalls * nodes);
  tape.reset();
  return (now() - begin) / kCalls;
}

void boundary(benchmark::State& state) {
  const Identity identity;
  double least = 1e30, function = 1e30;
  const auto measure = [&] {
    least = std::min(least, spent(state.range(0), 1, [&](const auto& leaves) {
                       return checkpoint(true, identity, leaves);
                     }));
    function =
        std::min(function, spent(state.range(0), 0, [&](const auto& leaves) {
                   const GradModeScope off(GradMode::kOff);
                   return identity(leaves);
                 }));
  };
  // Long enough that some repetitions meet no other program in the caches.
  for (const double end = now() + 3e9; now() < end;) measure();
  for (auto _ : state) measure();
  state.counters["ns"] = least - function;
  state.counters["function_ns"] = function;
  state.counters["goal"] = 1000.0 + 50.0 * static_cast<double>(state.range(0));
}
BENCHMARK(boundary)->Arg(1)->Arg(4)->Arg(16)->Arg(64);

}  // namespace
}  // namespace tapeline

BENCHMARK_MAIN();
