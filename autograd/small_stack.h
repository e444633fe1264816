// For tests that nothing recurses with the length of a program.
#pragma once

#include <errno.h>
#include <pthread.h>

#include <functional>

#include "gtest/gtest.h"

namespace tapeline::test_ops {

// Runs f on a thread with a stack of 64 KiB, or the least that holds the
// program's thread-local variables beside as much.
inline void on_small_stack(std::function<void()> f) {
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  const auto run = [](void* function) -> void* {
    (*static_cast<std::function<void()>*>(function))();
    return nullptr;
  };
  pthread_t thread;
  int error = EINVAL;
  for (size_t bytes = 64 << 10; error == EINVAL && bytes <= 256 << 10;
       bytes += 32 << 10) {
    ASSERT_EQ(pthread_attr_setstacksize(&attributes, bytes), 0);
    error = pthread_create(&thread, &attributes, run, &f);
  }
  ASSERT_EQ(error, 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

}  // namespace tapeline::test_ops
