#include "runtime/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/check.h"

namespace tapeline {
namespace {

// Set while a thread runs a chunk: a nested loop must not wait for the pool it
// is itself occupying.
thread_local bool inside_chunk = false;

}  // namespace

struct ThreadPool::State {
  struct Job {
    absl::FunctionRef<void(int64_t, int64_t)>* body;
    int64_t n, grain, chunks;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> left{0};
    int users = 0;  // workers inside run(); guarded by mutex
  };

  // Here and not in the pool: when one of several threads cannot start, those
  // that did are ended before the exception goes on.
  ~State() {
    {
      std::lock_guard lock(mutex);
      stop = true;
    }
    wake.notify_all();
    for (std::thread& worker : workers) worker.join();
  }

  // Takes chunks until none is left; returns how many it ran.
  static int64_t run(Job& job) {
    int64_t ran = 0;
    const bool before = inside_chunk;
    inside_chunk = true;
    for (;;) {
      const int64_t chunk = job.next.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= job.chunks) break;
      const int64_t begin = chunk * job.grain;
      (*job.body)(begin, std::min(job.n, begin + job.grain));
      job.left.fetch_sub(1, std::memory_order_acq_rel);
      ++ran;
    }
    inside_chunk = before;
    return ran;
  }

  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      wake.wait(lock, [&] {
        return stop || (job != nullptr && generation != seen_by(lock));
      });
      if (stop) return;
      Job* mine = job;
      seen = generation;
      ++mine->users;
      lock.unlock();
      const int64_t ran = run(*mine);
      worker_chunks.fetch_add(ran, std::memory_order_relaxed);
      lock.lock();
      --mine->users;
      done.notify_all();
    }
  }
  // One bit per worker would do; the generation it last joined is simpler.
  uint64_t seen_by(const std::unique_lock<std::mutex>&) const { return seen; }
  static thread_local uint64_t seen;

  std::mutex mutex, call_mutex;
  std::condition_variable wake, done;
  Job* job = nullptr;
  uint64_t generation = 0;
  bool stop = false;
  std::atomic<int64_t> worker_chunks{0};
  std::vector<std::thread> workers;
};

thread_local uint64_t ThreadPool::State::seen = 0;

ThreadPool::ThreadPool(int threads)
    : state_(std::make_unique<State>()), threads_(threads) {
  CHECK_GE(threads, 1);
  for (int i = 1; i < threads; ++i) {
    state_->workers.emplace_back([this] { state_->work(); });
  }
}

ThreadPool::~ThreadPool() = default;

int64_t ThreadPool::chunks_run_by_workers() const {
  return state_->worker_chunks.load();
}

void ThreadPool::parallel_for(int64_t n, int64_t grain,
                              absl::FunctionRef<void(int64_t, int64_t)> body) {
  if (n <= 0) return;
  CHECK_GT(grain, 0);
  const int64_t chunks = (n + grain - 1) / grain;
  if (chunks == 1 || threads_ == 1 || inside_chunk) {
    for (int64_t begin = 0; begin < n; begin += grain) {
      body(begin, std::min(n, begin + grain));
    }
    return;
  }
  // One loop at a time: rank threads that share the pool take turns.
  std::lock_guard call(state_->call_mutex);
  State::Job job{.body = &body, .n = n, .grain = grain, .chunks = chunks};
  job.left = chunks;
  {
    std::lock_guard lock(state_->mutex);
    state_->job = &job;
    ++state_->generation;
  }
  state_->wake.notify_all();
  State::run(job);
  std::unique_lock lock(state_->mutex);
  state_->job = nullptr;  // no worker may join any more
  state_->done.wait(lock, [&] { return job.users == 0 && job.left == 0; });
}

}  // namespace tapeline
