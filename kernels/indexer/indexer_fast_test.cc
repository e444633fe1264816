#include "kernels/indexer/indexer_fast.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "gtest/gtest.h"

namespace tapeline::cuda {
namespace {

// GLM-5: 32 heads of 128.
IndexerOperands glm5() {
  return {.bf16 = true,
          .q = 1024,
          .k = 2048,
          .tokens = 1024,
          .heads = 32,
          .dim = 128,
          .keys = 65536,
          .q_stride = 32 * 128,
          .head_stride = 128,
          .k_stride = 128,
          .scale = 0.088};
}

TEST(IndexerPlan, ModelsRunOnTensorCores) {
  for (int64_t heads : {32, 64}) {
    IndexerOperands x = glm5();
    x.heads = heads;
    EXPECT_TRUE(indexer_plan(x).wgmma) << heads;
  }
}

TEST(IndexerPlan, HeadsArePaddedToAPowerOfTwo) {
  for (const auto& [heads, padded] : {std::pair{1, 8},
                                      {4, 8},
                                      {8, 8},
                                      {9, 16},
                                      {32, 32},
                                      {33, 64},
                                      {128, 128}}) {
    IndexerOperands x = glm5();
    x.heads = heads;
    const IndexerPlan p = indexer_plan(x);
    EXPECT_EQ(p.padded_heads, padded) << heads;
    EXPECT_EQ(p.queries() * p.padded_heads, kIndexerColumns);
  }
}

TEST(IndexerPlan, AllElseIsPlain) {
  const auto plain = [](auto change) {
    IndexerOperands x = glm5();
    change(x);
    return indexer_plan(x) == IndexerPlan{};
  };
  using X = IndexerOperands&;
  EXPECT_FALSE(plain([](X) {}));
  EXPECT_TRUE(plain([](X x) { x.bf16 = false; }));
  EXPECT_TRUE(plain([](X x) { x.q += 8; }));
  EXPECT_TRUE(plain([](X x) { x.k += 2; }));
  EXPECT_TRUE(plain([](X x) { x.q_stride += 4; }));
  EXPECT_TRUE(plain([](X x) { x.head_stride += 1; }));
  EXPECT_TRUE(plain([](X x) { x.k_stride += 7; }));
  EXPECT_TRUE(plain([](X x) { x.scale = 0; }));
  EXPECT_TRUE(plain([](X x) { x.scale = -1; }));
  EXPECT_TRUE(plain([](X x) { x.dim = 136; }));
  EXPECT_TRUE(plain([](X x) { x.dim = 100; }));
  EXPECT_TRUE(plain([](X x) { x.dim = 0; }));
  EXPECT_TRUE(plain([](X x) { x.heads = 129; }));
  EXPECT_TRUE(plain([](X x) { x.heads = 0; }));
  EXPECT_TRUE(plain([](X x) { x.keys = 0; }));
  EXPECT_TRUE(plain([](X x) { x.keys = int64_t{1} << 31; }));
  EXPECT_TRUE(plain([](X x) { x.tokens = 0; }));
  EXPECT_TRUE(plain([](X x) { x.tokens = int64_t{1} << 31; }));
}

// Whole tiles, no fewer than 1024 keys, and all keys are someone's.
TEST(IndexerPlan, ChunksOfKeys) {
  for (int64_t tokens : {1, 9, 512, 100000}) {
    for (int64_t keys : {1, 1000, 1025, 65536, 1000000}) {
      IndexerOperands x = glm5();
      x.tokens = tokens;
      x.keys = keys;
      const IndexerPlan p = indexer_plan(x);
      EXPECT_EQ(p.chunk % kIndexerTile, 0);
      EXPECT_GE(p.chunk, 1024);
      const int64_t blocks = (tokens + p.queries() - 1) / p.queries();
      EXPECT_LE((keys + p.chunk - 1) / p.chunk * blocks,
                std::max<int64_t>(blocks, 132 * 8));
    }
  }
}

TEST(IndexerPlan, Prints) {
  std::ostringstream out;
  out << indexer_plan(glm5()) << "; " << IndexerPlan{};
  EXPECT_EQ(out.str(), "wgmma: 8 queries of 32 heads with 8192 keys; plain");
}

}  // namespace
}  // namespace tapeline::cuda
