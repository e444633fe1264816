// Runs a kernel with several numbers of threads and compares the bytes.
#pragma once

#include <barrier>
#include <chrono>

#include "gtest/gtest.h"
#include "kernels/kernel.h"
#include "runtime/thread_pool.h"
#include "tests/support/buffer.h"
#include "tests/support/close.h"

namespace tapeline {

// A launch with a thread pool of its own.
class Threads {
 public:
  explicit Threads(int count) : pool_(count) {}
  Launch launch() { return {&stream_, &pool_}; }
  operator Launch() { return launch(); }
  // Since construction or the last gather().
  int64_t chunks_run_by_workers() const {
    return pool_.chunks_run_by_workers() - before_;
  }
  // Returns once every worker has run something: a busy machine would otherwise
  // wake them after the next loop's last chunk.
  void gather() {
    std::barrier all(pool_.threads());
    pool_.parallel_for(pool_.threads(), 1,
                       [&](int64_t, int64_t) { all.arrive_and_wait(); });
    before_ = pool_.chunks_run_by_workers();
  }

 private:
  CpuStream stream_{"test"};
  ThreadPool pool_;
  int64_t before_ = 0;
};

// run(launch) computes `y` anew from what `reset` prepares. Success if 1, 2, 3
// and 7 threads give the same bytes, and with more than one, worker threads
// really ran chunks.
template <class T, class Reset, class Run>
testing::AssertionResult SameForAnyThreads(
    Buffer<T>& y, Reset reset, Run run,
    std::chrono::milliseconds patience = std::chrono::seconds(20)) {
  Threads one(1);
  reset();
  run(one.launch());
  const Buffer<T> expected = y;
  for (int count : {2, 3, 7}) {
    Threads threads(count);
    // Workers may still come too late: again.
    const auto begin = std::chrono::steady_clock::now();
    while (threads.chunks_run_by_workers() == 0) {
      if (std::chrono::steady_clock::now() - begin > patience) {
        return testing::AssertionFailure()
               << count << " threads: workers ran no chunk";
      }
      threads.gather();
      reset();
      run(threads.launch());
      const auto same = Bitwise(y.in(), expected.in());
      if (!same) {
        return testing::AssertionFailure()
               << "with " << count << " threads: " << same.message();
      }
    }
  }
  return testing::AssertionSuccess();
}
template <class T, class Run>
testing::AssertionResult SameForAnyThreads(Buffer<T>& y, Run run) {
  return SameForAnyThreads(
      y, [&] { y.poison(); }, run);
}

}  // namespace tapeline
