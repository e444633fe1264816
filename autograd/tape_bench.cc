// What the tape costs per node, apart from the kernels it records.
//
//   bazel run //autograd:tape_bench -- --benchmark_format=json
//
//   record/N     N rms_norm ops in a row on a tensor of one element: each has a
//                parameter, saves two tensors and makes two allocations
//   backward/N   the way back over them, freeing nodes as it goes
//   free/N       the end of a tape that never went back
//   hook_pair/N  N nodes that save one tensor: record and backward with a hook
//                that does nothing
//
// Counters are nanoseconds of processor time per node, each from the fastest
// iteration, as other programs on the machine only ever add time:
//   total   what the name says
//   kernel  the same kernels and allocations in the same order by plain calls,
//           with the same storages kept alive and freed (hook_pair: the same
//           nodes without the hook)
//   net     total - kernel: the goals are 100, 150, 30 and 20
#include <time.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "autograd/ops.h"
#include "benchmark/benchmark.h"
#include "kernels/rms_norm/rms_norm.h"
#include "runtime/access.h"

namespace tapeline {
namespace {

constexpr double kEps = 1e-6;

// The least processor time of this thread seen, in nanoseconds.
class Fastest {
 public:
  template <class F>
  void time(F&& f) {
    const double begin = now();
    f();
    least_ = std::min(least_, now() - begin);
  }
  double per(int64_t n) const { return least_ / static_cast<double>(n); }

 private:
  static double now() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
  }
  double least_ = 1e30;
};

void report(benchmark::State& state, const Fastest& total,
            const Fastest& kernel) {
  const int64_t n = state.range(0);
  state.counters["total"] = total.per(n);
  state.counters["kernel"] = kernel.per(n);
  state.counters["net"] = total.per(n) - kernel.per(n);
}

Tensor one() { return Tensor::full({1, 1}, DType::kF32, 1); }

struct Chain {
  std::vector<Parameter> weights;
  Tensor x = one();

  explicit Chain(int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      weights.emplace_back(Shape{1});
      weights.back().set_value("w", Tensor::full({1}, DType::kF32, 1));
    }
  }
  // The op, recorded on `tape`.
  Tensor run(Tape& tape) const {
    const RecordScope scope(tape);
    Tensor y = tape.input(x);
    for (const Parameter& w : weights) y = rms_norm(y, w, kEps);
    return y;
  }
};

// The chain's kernels and allocations alone. Tensors are kept by their storage:
// what it costs to keep handles is the tape's.
struct PlainChain {
  const Chain& chain;
  std::vector<StoragePtr> kept;  // x and rstd of each op, and the last y

  explicit PlainChain(const Chain& of) : chain(of) {
    kept.reserve(2 * of.weights.size() + 1);
  }
  Tensor forward() {
    Tensor x = chain.x;
    for (const Parameter& w : chain.weights) {
      const Tensor y = Tensor::empty({1, 1}, DType::kF32);
      const Tensor rstd = Tensor::empty({1}, DType::kF32);
      rms_norm_forward<float>(launch(), read<float>(x), read<float>(w.value()),
                              static_cast<float>(kEps), write<float>(y),
                              write<float>(rstd));
      kept.push_back(x.storage());
      kept.push_back(rstd.storage());
      x = y;
    }
    return x;
  }
  // dy of every op from the one before; x, rstd and dw stand for the right ones
  // by one of each: the kernels do the same work.
  void backward(const Tensor& y, ParameterGradients& grads) {
    const Tensor rstd = Tensor::full({1}, DType::kF32, 1);
    Tensor dy = one();
    for (size_t i = chain.weights.size(); i-- > 0;) {
      const Parameter& w = chain.weights[i];
      const Tensor dx = Tensor::empty({1, 1}, DType::kF32);
      rms_norm_backward<float>(launch(), read<float>(dy), read<float>(y),
                               read<float>(w.value()), read<float>(rstd),
                               write<float>(dx));
      rms_norm_backward_weight<float>(launch(), read<float>(dy), read<float>(y),
                                      read<float>(rstd),
                                      write<float>(grads.accumulator(w, 0)));
      dy = dx;
      kept.resize(2 * i);
    }
  }
};

void record(benchmark::State& state) {
  const Chain chain(state.range(0));
  Fastest total, kernel;
  for (auto _ : state) {
    auto tape = std::make_unique<Tape>();
    Tensor y;
    total.time([&] { y = chain.run(*tape); });
    state.PauseTiming();
    tape.reset();
    PlainChain plain(chain);
    kernel.time([&] { benchmark::DoNotOptimize(plain.forward()); });
    plain.kept.clear();
    state.ResumeTiming();
  }
  report(state, total, kernel);
}

void backward(benchmark::State& state) {
  const Chain chain(state.range(0));
  ParameterGradients grads;
  Fastest total, kernel;
  for (auto _ : state) {
    state.PauseTiming();
    {
      PlainChain plain(chain);
      const Tensor y = plain.forward();
      kernel.time([&] { plain.backward(y, grads); });
    }
    Tape tape;
    const Tensor y = chain.run(tape);
    const std::vector<Seed> seeds = {{y, one()}};
    state.ResumeTiming();
    total.time([&] { tape.backward(seeds, grads); });
  }
  report(state, total, kernel);
}

void free(benchmark::State& state) {
  const Chain chain(state.range(0));
  Fastest total, kernel;
  for (auto _ : state) {
    state.PauseTiming();
    {
      PlainChain plain(chain);
      plain.forward();
      kernel.time([&] { plain.kept.clear(); });
    }
    auto tape = std::make_unique<Tape>();
    chain.run(*tape);
    state.ResumeTiming();
    total.time([&] { tape.reset(); });
  }
  report(state, total, kernel);
}

struct SaveNode : Node {
  SavedTensor x;
  void backward_inputs(Backward& b) override {
    benchmark::DoNotOptimize(x.unpack());
    b.add(0, b.grad());
  }
};

class NoHooks : public SavedTensorHooks {
 public:
  SavedHandle pack(Tensor&) override { return {}; }
  Tensor unpack(SavedHandle, const Tensor& kept) override { return kept; }
};

void hook_pair(benchmark::State& state) {
  const Tensor x = one();
  ParameterGradients grads;
  const auto step = [&] {
    Tape tape;
    const RecordScope scope(tape);
    Tensor y = tape.input(x);
    for (int64_t i = 0; i < state.range(0); ++i) {
      Tensor next = x;
      push<SaveNode>("save", {&y}, {&next})->x.save(x);
      y = next;
    }
    tape.backward(y, grads);
  };
  const auto hooks = std::make_shared<NoHooks>();
  Fastest total, kernel;
  for (auto _ : state) {
    {
      const HookScope scope(hooks);
      total.time(step);
    }
    state.PauseTiming();
    kernel.time(step);
    state.ResumeTiming();
  }
  report(state, total, kernel);
}

BENCHMARK(record)->Arg(1000)->Arg(10000)->Arg(100000);
BENCHMARK(backward)->Arg(1000)->Arg(10000)->Arg(100000);
BENCHMARK(free)->Arg(1000)->Arg(10000)->Arg(100000);
BENCHMARK(hook_pair)->Arg(1000);

}  // namespace
}  // namespace tapeline
