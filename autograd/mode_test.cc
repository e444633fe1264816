#include "autograd/mode.h"

#include <cstdlib>
#include <new>
#include <thread>

#include "gtest/gtest.h"

// Counts allocations of this thread.
namespace {
thread_local int64_t allocations = 0;
}  // namespace
void* operator new(size_t bytes) {
  ++allocations;
  if (void* p = std::malloc(bytes)) return p;
  std::abort();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace tapeline {
namespace {

TEST(GradMode, IsOnAndRestoredByScopes) {
  EXPECT_EQ(grad_mode(), GradMode::kOn);
  {
    const GradModeScope off(GradMode::kOff);
    EXPECT_EQ(grad_mode(), GradMode::kOff);
    {
      const GradModeScope shadow(GradMode::kShadow);
      EXPECT_EQ(grad_mode(), GradMode::kShadow);
    }
    EXPECT_EQ(grad_mode(), GradMode::kOff);
  }
  EXPECT_EQ(grad_mode(), GradMode::kOn);
}

TEST(GradMode, BelongsToItsThread) {
  const GradModeScope off(GradMode::kOff);
  const UseSite site(3);
  const LayerScope layer("layers");
  GradMode other = GradMode::kOff;
  int other_site = -1;
  uint32_t other_scope = 99;
  std::thread([&] {
    other = grad_mode();
    other_site = use_site();
    other_scope = layer_scope();
  }).join();
  EXPECT_EQ(other, GradMode::kOn);
  EXPECT_EQ(other_site, 0);
  EXPECT_EQ(other_scope, 0u);
}

TEST(UseSite, IsZeroAndRestoredByScopes) {
  EXPECT_EQ(use_site(), 0);
  {
    const UseSite outer(2);
    const UseSite inner(5);
    EXPECT_EQ(use_site(), 5);
  }
  EXPECT_EQ(use_site(), 0);
}

TEST(LayerScope, JoinsNamesAndIndicesWithDots) {
  EXPECT_EQ(layer_path(layer_scope()), "");
  const LayerScope layer("layers", 12);
  EXPECT_EQ(layer_path(layer_scope()), "layers.12");
  uint32_t inside = 0;
  {
    const LayerScope mlp("mlp");
    inside = layer_scope();
    EXPECT_EQ(layer_path(inside), "layers.12.mlp");
  }
  EXPECT_EQ(layer_path(layer_scope()), "layers.12");
  // Numbers stay good after their scope, as nodes keep them.
  EXPECT_EQ(layer_path(inside), "layers.12.mlp");
}

TEST(LayerScope, GivesOnePathOneNumber) {
  const auto number = [](const char* outer, const char* inner) {
    const LayerScope a(outer);
    const LayerScope b(inner);
    return layer_scope();
  };
  EXPECT_EQ(number("a", "b"), number("a", "b"));
  EXPECT_NE(number("a", "b"), number("a", "c"));
  EXPECT_NE(number("a", "b"), number("c", "b"));
}

TEST(LayerScope, AllocatesNothingOnKnownPaths) {
  const auto enter = [] {
    const LayerScope a("a_name_that_is_too_long_to_be_stored_inline");
    const LayerScope b("layers", 1000000);
    return layer_scope();
  };
  enter();
  const int64_t before = allocations;
  for (int i = 0; i < 100; ++i) enter();
  EXPECT_EQ(allocations, before);
}

TEST(LayerScope, NumbersAreSharedByThreads) {
  std::vector<uint32_t> seen(4);
  std::vector<std::thread> threads;
  for (uint32_t& slot : seen) {
    threads.emplace_back([&slot] {
      for (int i = 0; i < 200; ++i) {
        const LayerScope layer("shared", i);
        if (i == 199) slot = layer_scope();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const uint32_t number : seen) {
    EXPECT_EQ(number, seen[0]);
    EXPECT_EQ(layer_path(number), "shared.199");
  }
}

}  // namespace
}  // namespace tapeline
