// For tests that nothing recurses with the length of a program.
#pragma once

#include <pthread.h>

#include <functional>

#include "gtest/gtest.h"

namespace tapeline::test_ops {

// Runs f on a thread with a stack of 64 KiB.
inline void on_small_stack(std::function<void()> f) {
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, 64 << 10), 0);
  pthread_t thread;
  ASSERT_EQ(pthread_create(
                &thread, &attributes,
                [](void* function) -> void* {
                  (*static_cast<std::function<void()>*>(function))();
                  return nullptr;
                },
                &f),
            0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

}  // namespace tapeline::test_ops
