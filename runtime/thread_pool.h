// A fixed set of worker threads and a parallel loop whose result never depends
// on how many there are.
//
// parallel_for cuts [0, n) into chunks of `grain` (the last may be shorter);
// the cut depends on n and grain alone. Chunks run in any order on any thread,
// so a body must write only what belongs to its chunk; a sum over chunks goes
// through one partial per chunk, added afterwards in chunk order.
// Calls from inside a body run serially on the calling thread. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/functional/function_ref.h"

namespace tapeline {

class ThreadPool {
 public:
  // threads >= 1 counts the calling thread.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }
  // Chunks run by a thread other than the caller's since construction: shows
  // that a test really ran in parallel.
  int64_t chunks_run_by_workers() const;

  // body(begin, end) for every chunk.
  void parallel_for(int64_t n, int64_t grain,
                    absl::FunctionRef<void(int64_t, int64_t)> body);

 private:
  struct State;
  std::unique_ptr<State> state_;
  int threads_;
};

}  // namespace tapeline
