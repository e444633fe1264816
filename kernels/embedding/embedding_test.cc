#include "kernels/embedding/embedding.h"

#include <cmath>
#include <cstddef>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/embedding/embedding_cases.h"
#include "tests/support/buffer.h"
#include "tests/support/cases.h"
#include "tests/support/close.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

template <class T>
class Embedding : public testing::Test {};
using FloatTypes = testing::Types<float, bf16, double>;
TYPED_TEST_SUITE(Embedding, FloatTypes);

template <class T>
struct Problem {
  explicit Problem(const EmbeddingCase& c)
      : tokens(static_cast<int64_t>(c.ids.size())),
        ids({tokens}),
        table({c.v, c.d}, c.gap),
        y({tokens, c.d}, c.gap),
        dy({tokens, c.d}, c.gap),
        dtable({c.v, c.d}, c.gap) {
    ids.set(c.ids);
    table.normal(1);
    dy.normal(2);
    dtable.normal(3);
  }

  int64_t tokens;
  Buffer<int32_t> ids;
  Buffer<T> table, y, dy;
  Buffer<Accumulator<T>> dtable;
};

TYPED_TEST(Embedding, ForwardCopiesRowsExactly) {
  using T = TypeParam;
  for (const EmbeddingCase& c : each(embedding_cases())) {
    Problem<T> p(c);
    embedding_forward(launch(), p.ids.in(), p.table.in(), p.y.view());
    for (int64_t t = 0; t < p.tokens; ++t) {
      EXPECT_TRUE(
          Bitwise(p.y.in()[t], p.table.in()[static_cast<int64_t>(c.ids[t])]));
    }
    EXPECT_TRUE(p.y.guards_intact());
  }
}

// Magnitudes from 2^-32 to 2^31: the order of additions decides the last bits.
template <class T>
void spread(Buffer<T>& dy) {
  std::vector<double> values = dy.values();
  const int64_t d = dy.in().size(1);
  for (int64_t t = 0; t < dy.in().size(0); ++t) {
    for (int64_t j = 0; j < d; ++j) {
      values[t * d + j] *= std::ldexp(1.0, (t * 29 + j) % 64 - 32);
    }
  }
  dy.set(values);
}

// The order of additions is a promise, so the sum is repeated in it, bitwise.
TYPED_TEST(Embedding, BackwardAddsInOrderOfTokens) {
  using T = TypeParam;
  using A = Accumulator<T>;
  for (const EmbeddingCase& c : each(embedding_cases())) {
    Problem<T> p(c);
    spread(p.dy);
    const std::vector<double> before = p.dtable.values(), dy = p.dy.values();
    std::vector<A> sums(before.begin(), before.end());
    for (int64_t t = 0; t < p.tokens; ++t) {
      const int64_t id = static_cast<int64_t>(c.ids[t]);
      if (id == c.padding_id) continue;
      for (int64_t j = 0; j < c.d; ++j) {
        sums[id * c.d + j] += static_cast<A>(dy[t * c.d + j]);
      }
    }
    // Whatever the workspace held.
    std::vector<std::byte> space(
        embedding_backward_workspace_bytes(launch(), p.tokens, c.v),
        std::byte{0x5a});
    for (std::byte* workspace : {static_cast<std::byte*>(nullptr),
                                 space.empty() ? nullptr : space.data()}) {
      p.dtable.set(before);
      embedding_backward(launch(), p.ids.in(), p.dy.in(), p.dtable.view(),
                         c.padding_id, workspace);
      const std::vector<double> got = p.dtable.values();
      EXPECT_EQ(std::vector<A>(got.begin(), got.end()), sums);
      EXPECT_TRUE(p.dtable.guards_intact());
    }
  }
}

TYPED_TEST(Embedding, BitsDoNotDependOnThreads) {
  EmbeddingCase c = {{}, 7, 512};
  for (int t = 0; t < 3000; ++t) c.ids.push_back((t * t) % 7);
  Problem<TypeParam> p(c);
  spread(p.dy);
  EXPECT_TRUE(SameForAnyThreads(p.y, [&](Launch l) {
    embedding_forward(l, p.ids.in(), p.table.in(), p.y.view());
  }));
  EXPECT_TRUE(SameForAnyThreads(
      p.dtable, [&] { p.dtable.normal(3); },
      [&](Launch l) {
        embedding_backward(l, p.ids.in(), p.dy.in(), p.dtable.view());
      }));
}

// On the CPU: elsewhere the host cannot read ids.
TEST(EmbeddingDeathTest, IdsAreInsideTheTable) {
  Threads cpu(1);
  for (const double wrong : {-1.0, 4.0}) {
    Problem<float> p({{0, wrong}, 4, 8});
    EXPECT_DEATH(embedding_forward(cpu, p.ids.in(), p.table.in(), p.y.view()),
                 "\\[embedding_forward\\] id (-1|4) of token 1");
  }
}

}  // namespace
}  // namespace tapeline
