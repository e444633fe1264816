#include "runtime/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

using Chunk = std::pair<int64_t, int64_t>;

std::vector<Chunk> chunks_of(ThreadPool& pool, int64_t n, int64_t grain) {
  std::mutex mutex;
  std::vector<Chunk> chunks;
  pool.parallel_for(n, grain, [&](int64_t begin, int64_t end) {
    std::lock_guard lock(mutex);
    chunks.emplace_back(begin, end);
  });
  std::sort(chunks.begin(), chunks.end());
  return chunks;
}

TEST(ThreadPool, RunsEveryIndexOnce) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (int64_t n : {0, 1, 7, 64, 1000}) {
      for (int64_t grain : {1, 3, 64, 5000}) {
        std::vector<std::atomic<int>> seen(static_cast<size_t>(n));
        pool.parallel_for(n, grain, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++seen[i];
        });
        for (const auto& count : seen) ASSERT_EQ(count.load(), 1);
      }
    }
  }
}

TEST(ThreadPool, TheCutDoesNotDependOnTheThreads) {
  const std::vector<Chunk> expected = {{0, 4}, {4, 8}, {8, 10}};
  for (int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    EXPECT_EQ(chunks_of(pool, 10, 4), expected);
  }
}

TEST(ThreadPool, WorkersTakeChunks) {
  ThreadPool pool(3);
  EXPECT_EQ(pool.threads(), 3);
  // Chunks that wait for each other can end only on different threads.
  std::atomic<int> arrived{0};
  pool.parallel_for(3, 1, [&](int64_t, int64_t) {
    ++arrived;
    while (arrived.load() < 3) std::this_thread::yield();
  });
  EXPECT_EQ(pool.chunks_run_by_workers(), 2);
}

TEST(ThreadPool, NestedLoopsRunOnTheirOwnThread) {
  ThreadPool pool(3);
  std::vector<std::atomic<int>> seen(6 * 50);
  pool.parallel_for(6, 1, [&](int64_t outer, int64_t) {
    const auto thread = std::this_thread::get_id();
    pool.parallel_for(50, 7, [&](int64_t begin, int64_t end) {
      EXPECT_EQ(std::this_thread::get_id(), thread);
      for (int64_t i = begin; i < end; ++i) ++seen[outer * 50 + i];
    });
  });
  for (const auto& count : seen) EXPECT_EQ(count.load(), 1);
}

TEST(ThreadPool, SeveralThreadsMayCall) {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  std::atomic<int64_t> sum{0};
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        pool.parallel_for(
            20, 3, [&](int64_t begin, int64_t end) { sum += end - begin; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum.load(), 4 * 200 * 20);
}

TEST(ThreadPool, ReturnsOnlyWhenAllIsDone) {
  ThreadPool pool(4);
  for (int repeat = 0; repeat < 500; ++repeat) {
    std::vector<int> out(64, 0);
    pool.parallel_for(64, 1, [&](int64_t begin, int64_t) {
      out[begin] = static_cast<int>(begin) + repeat;
    });
    for (int i = 0; i < 64; ++i) ASSERT_EQ(out[i], i + repeat);
  }
}

TEST(ThreadPoolDeathTest, RefusesNonsense) {
  EXPECT_DEATH(ThreadPool(0), "check failed");
  ThreadPool pool(1);
  EXPECT_DEATH(pool.parallel_for(3, 0, [](int64_t, int64_t) {}),
               "check failed");
}

}  // namespace
}  // namespace tapeline
