// What offload costs besides its copies, and what freeing a tape costs.
//
//   bazel run //autograd:offload_bench -- --benchmark_format=json
//
//   pack/N        saves of one storage through an open window, after the first,
//                 which begins the copy; N windows deep. Goal: 100 ns a save,
//                 and no allocation.
//   window        opening and closing a window that keeps its bytes
//   round_trip/B  a window's B bytes out and back; GB/s, as copied
//   free/N        destroying a tape of N nodes on a thread with a stack of
//                 64 KiB. Goal: 100 ms for a million.
//
// `ns` is nanoseconds of processor time from the fastest repetition, `ms`
// likewise. Left out: what overlaps a copy on a device with copy engines.
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "autograd/offload.h"
#include "autograd/ops.h"
#include "autograd/tape.h"
#include "benchmark/benchmark.h"
#include "runtime/check.h"
#include "runtime/tensor.h"

namespace {
int64_t allocations = 0;
}  // namespace
void* operator new(size_t bytes) {
  ++allocations;
  if (void* at = std::malloc(bytes)) return at;
  std::abort();
}
void operator delete(void* at) noexcept { std::free(at); }
void operator delete(void* at, size_t) noexcept { std::free(at); }

namespace tapeline {
namespace {

double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
}

std::vector<PlannedWindow> windows(int count, int64_t bytes) {
  std::vector<LayerCall> calls;
  for (int i = 0; i < count; ++i) calls.push_back({i, bytes});
  return plan_windows(calls, {true, false, {}});
}

struct Nothing : Node {
  void backward_inputs(Backward&) override {}
};

void pack(benchmark::State& state) {
  constexpr int kSaves = 1000;
  double least = 1e30;
  int64_t made = 0;
  for (auto _ : state) {
    OffloadGraph graph(windows(2, 4096), false);
    Tape tape;
    const Tensor x = Tensor::full({1024}, DType::kF32, 1);
    record(tape, [&] {
      const OffloadWindow window(&graph, 0, {x}, {});
      Tensor y = x.detach();
      internal::add_node<Nothing>("nothing", 0, std::array{&y});
      auto saved = std::make_unique<SavedTensor[]>(kSaves);
      saved[0].save(x);
      const int64_t before = allocations;
      const double begin = now();
      for (int i = 1; i < kSaves; ++i) saved[i].save(x);
      least = std::min(least, (now() - begin) / (kSaves - 1));
      made = allocations - before;
      return 0;
    });
    CHECK_EQ(graph.counters().copies, 1);
    CHECK_EQ(graph.counters().repeated, kSaves - 1);
  }
  state.counters["ns"] = least;
  state.counters["goal"] = 100;
  // Chunks of the tape, 64 KiB each, are the tape's own memory.
  state.counters["allocations"] = static_cast<double>(made);
}
BENCHMARK(pack);

void window(benchmark::State& state) {
  constexpr int kWindows = 200;
  double least = 1e30;
  for (auto _ : state) {
    OffloadGraph graph(windows(kWindows + 1, 4096), false);
    Tape tape;
    const Tensor x = Tensor::full({1024}, DType::kF32, 1);
    record(tape, [&] {
      const double begin = now();
      for (int i = 0; i < kWindows; ++i) {
        const OffloadWindow window(&graph, i, {x}, {});
      }
      least = std::min(least, (now() - begin) / kWindows);
      return 0;
    });
    CHECK_EQ(graph.counters().windows, kWindows);
  }
  state.counters["ns"] = least;
}
BENCHMARK(window);

void round_trip(benchmark::State& state) {
  const int64_t bytes = state.range(0);
  double least = 1e30;
  for (auto _ : state) {
    const Tensor x = Tensor::full({bytes / 4}, DType::kF32, 1);
    const double begin = now();
    CHECK(x.storage()->copy_out());
    CHECK(x.storage()->evict());
    x.storage()->load();
    least = std::min(least, now() - begin);
    CHECK(x.to_vector<float>().back() == 1);
  }
  state.counters["ns"] = least;
  state.counters["gbps"] = 2 * static_cast<double>(bytes) / least;
}
BENCHMARK(round_trip)->Arg(1 << 16)->Arg(1 << 20)->Arg(1 << 24);

double free_on_small_stack(std::unique_ptr<Tape> tape) {
  struct Work {
    std::unique_ptr<Tape> tape;
    double spent = 0;
  } work{std::move(tape)};
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  CHECK_EQ(pthread_attr_setstacksize(&attributes, 64 << 10), 0);
  pthread_t thread;
  CHECK_EQ(pthread_create(
               &thread, &attributes,
               [](void* argument) -> void* {
                 auto* w = static_cast<Work*>(argument);
                 const double begin = now();
                 w->tape.reset();
                 w->spent = now() - begin;
                 return nullptr;
               },
               &work),
           0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  return work.spent;
}

void free(benchmark::State& state) {
  double least = 1e30;
  for (auto _ : state) {
    auto tape = std::make_unique<Tape>();
    Tensor x = tape->input(Tensor::full({1}, DType::kF32, 1));
    record(*tape, [&] {
      for (int64_t i = 0; i < state.range(0); ++i) x = scale(x, 1.0);
      return 0;
    });
    CHECK_EQ(tape->nodes(), state.range(0));
    x = Tensor();
    least = std::min(least, free_on_small_stack(std::move(tape)));
  }
  state.counters["ms"] = least / 1e6;
  state.counters["goal"] = 1e-4 * static_cast<double>(state.range(0));
}
BENCHMARK(free)->Arg(1'000'000)->Iterations(3);

}  // namespace
}  // namespace tapeline

BENCHMARK_MAIN();
