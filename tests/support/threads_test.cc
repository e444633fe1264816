#include "tests/support/threads.h"

#include <chrono>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

TEST(SameForAnyThreads, PassesAndFailsByTheBytes) {
  Buffer<float> y({1 << 20});
  EXPECT_TRUE(SameForAnyThreads(y, [&](Launch l) {
    l.threads->parallel_for(1 << 20, 1024, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) y.view()(i) = begin;
    });
  }));
  const auto result = SameForAnyThreads(y, [&](Launch l) {
    l.threads->parallel_for(1 << 20, 1024, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        y.view()(i) = static_cast<float>(l.threads->threads());
      }
    });
  });
  EXPECT_FALSE(result);
  EXPECT_NE(std::string(result.message()).find("with 2 threads"),
            std::string::npos);
}

TEST(SameForAnyThreads, FailsIfNothingRanInParallel) {
  Buffer<float> y({4});
  const auto result = SameForAnyThreads(
      y, [] {},
      [&](Launch) {
        y.set({1, 2, 3, 4});
      },
      std::chrono::milliseconds(100));
  EXPECT_FALSE(result);
  EXPECT_NE(std::string(result.message()).find("workers ran no chunk"),
            std::string::npos);
}

}  // namespace
}  // namespace tapeline
