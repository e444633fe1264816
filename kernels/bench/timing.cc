#include "kernels/bench/timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <thread>
#include <utility>

#include "kernels/bench/gpu_timer.h"
#include "kernels/cuda_dispatch.h"
#include "kernels/matmul/matmul.h"

namespace tapeline::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kBurstSeconds = 0.01;

// On a GPU: more launches than this would fill the queue that hides the host's
// time.
constexpr int64_t kMostQueued = 200;
constexpr double kMostBusySeconds = 0.06;
constexpr std::chrono::milliseconds kPause(30);
constexpr int64_t kCopiedBytes = int64_t{2} << 30;

Seconds time_launches(const std::function<void()>& launch, int64_t count) {
  const std::clock_t processor = std::clock();
  const Clock::time_point begin = Clock::now();
  for (int64_t i = 0; i < count; ++i) launch();
  const double n = static_cast<double>(count);
  return {std::chrono::duration<double>(Clock::now() - begin).count() / n,
          static_cast<double>(std::clock() - processor) / CLOCKS_PER_SEC / n};
}

std::vector<Seconds> time_cpu_bursts(const std::function<void()>& launch) {
  int64_t count = 1;
  double took = time_launches(launch, count).wall;  // warm-up as well
  while (took * static_cast<double>(count) < kBurstSeconds) {
    count = std::max(2 * count, static_cast<int64_t>(1.2 * kBurstSeconds /
                                                     std::max(took, 1e-9)));
    took = time_launches(launch, count).wall;
  }
  std::vector<Seconds> bursts;
  for (int i = 0; i < kBursts; ++i) {
    bursts.push_back(time_launches(launch, count));
  }
  std::sort(bursts.begin(), bursts.end());
  return bursts;
}

std::vector<Seconds> time_gpu_bursts(Launch l, Turns& turns) {
  if (!kCuda) std::abort();  // nobody asks, and gpu_timer.h is not linked
  const auto queue = [&](int64_t count) {
    for (int64_t i = 0; i < count; ++i) turns.launch();
  };
  const auto sets = static_cast<int64_t>(turns.runs.size());
  cuda::time_on_gpu(l, 0, [&] { queue(std::max<int64_t>(3, sets)); });
  // Behind a busy stream the host does nothing but queue.
  double host = 0;
  const double took = cuda::time_on_gpu(l, 0.005, [&] {
    const Clock::time_point begin = Clock::now();
    queue(3);
    host = std::chrono::duration<double>(Clock::now() - begin).count() / 3;
  });
  const auto count = std::clamp<int64_t>(
      static_cast<int64_t>(std::ceil(kBurstSeconds / (took / 3))), 1,
      kMostQueued);
  const double busy = std::min(
      kMostBusySeconds, 1.3 * host * static_cast<double>(count) + 0.0002);
  std::vector<Seconds> bursts;
  for (int i = 0; i < kBursts; ++i) {
    std::this_thread::sleep_for(kPause);
    const double seconds = cuda::time_on_gpu(l, busy, [&] { queue(count); });
    bursts.push_back({seconds / static_cast<double>(count), 0});
  }
  std::sort(bursts.begin(), bursts.end());
  return bursts;
}

Run make_product(Launch l, const Product& p) {
  struct Data {
    Array<bf16> x, w, y;
  };
  auto data = std::make_shared<Data>(Data{normal<bf16>(p.m * p.k, 1),
                                          normal<bf16>(p.n * p.k, 2),
                                          Array<bf16>(p.m * p.n)});
  return {.launch =
              [=] {
                const Data& in = *data;
                matmul(l, view_of(in.x, {p.m, p.k}), view_of(in.w, {p.n, p.k}),
                       view_of(data->y, {p.m, p.n}), {.transpose_b = true});
              },
          .cost = matmul_cost(1, p.m, p.n, p.k, sizeof(bf16)),
          .verify = {}};
}

double median_seconds(Launch l, std::vector<Run> runs) {
  Turns turns{std::move(runs)};
  return time_gpu_bursts(l, turns)[kBursts / 2].wall;
}

}  // namespace

std::vector<Seconds> time_bursts(Launch l, Turns& turns) {
  if (kCuda && l.on_cuda()) return time_gpu_bursts(l, turns);
  return time_cpu_bursts([&] { turns.launch(); });
}

std::vector<Seconds> time_once(Launch l, Turns& turns) {
  turns.launch();
  if (kCuda && l.on_cuda()) {
    cuda::profile_from_here();
    const double seconds = cuda::time_on_gpu(l, 0, [&] { turns.launch(); });
    cuda::profile_to_here();
    return {{seconds, 0}};
  }
  return {time_launches([&] { turns.launch(); }, 1)};
}

double product_tflops(Launch l, const Product& p) {
  std::vector<Run> runs;
  for (int set = 0; set < 2; ++set) {
    use_set(set);
    runs.push_back(make_product(l, p));
  }
  const double flops = runs[0].cost.flops;
  return flops / median_seconds(l, std::move(runs)) * 1e-12;
}

double copy_gbps(Launch l) {
  const auto from = std::make_shared<Array<float>>(
      normal<float>(kCopiedBytes / static_cast<int64_t>(sizeof(float)), 1));
  const auto to = std::make_shared<Array<float>>(from->size());
  const Run run = {
      .launch = [=] { l.stream->copy(to->data(), from->data(), kCopiedBytes); },
      .cost = {},
      .verify = {}};
  return 2.0 * kCopiedBytes / median_seconds(l, {run}) * 1e-9;
}

}  // namespace tapeline::bench
