#include "kernels/indexer_loss/indexer_loss_fast.h"

#include <sstream>

#include "gtest/gtest.h"

namespace tapeline::cuda {
namespace {

constexpr auto kPlain = IndexerLossPath::kPlain;
constexpr auto kWgmma = IndexerLossPath::kWgmma;

IndexerLossOperands glm52() { return {true, 32, 128, 8192, 2048, 0.09, true}; }
IndexerLossPath forward(const IndexerLossOperands& x) {
  return indexer_loss_forward_path(x, 64, 576);
}

TEST(IndexerLossPath, IndexersOfRealModelsRunOnTensorCores) {
  IndexerLossOperands x = glm52();
  for (int64_t heads : {1, 16, 32, 64}) {
    for (int64_t dim : {64, 128}) {
      x.index_heads = heads;
      x.index_dim = dim;
      EXPECT_EQ(forward(x), kWgmma) << heads << " " << dim;
      EXPECT_EQ(indexer_loss_backward_path(x), kWgmma) << heads << " " << dim;
    }
  }
  x = glm52();
  for (int64_t selected : {0, 1, 63, 2047}) {
    x.selected = selected;
    EXPECT_EQ(forward(x), kWgmma) << selected;
  }
  for (int64_t heads : {1, 32, 65, 128}) {
    EXPECT_EQ(indexer_loss_forward_path(glm52(), heads, 576), kWgmma) << heads;
  }
}

TEST(IndexerLossPath, AllElseIsPlain) {
  const auto changed = [](auto change) {
    IndexerLossOperands x = glm52();
    change(x);
    return x;
  };
  using X = IndexerLossOperands;
  for (const X& x : {changed([](X& x) { x.bf16 = false; }),
                     changed([](X& x) { x.index_heads = 0; }),
                     changed([](X& x) { x.index_heads = 65; }),
                     changed([](X& x) { x.index_dim = 32; }),
                     changed([](X& x) { x.index_dim = 120; }),
                     changed([](X& x) { x.keys = 0; }),
                     changed([](X& x) { x.selected = 2049; }),
                     changed([](X& x) { x.index_scale = 0; }),
                     changed([](X& x) { x.index_scale = -1; }),
                     changed([](X& x) { x.aligned = false; })}) {
    EXPECT_EQ(forward(x), kPlain);
    EXPECT_EQ(indexer_loss_backward_path(x), kPlain);
  }
  // Attention matters to the forward pass alone.
  EXPECT_EQ(indexer_loss_forward_path(glm52(), 64, 575), kPlain);
  EXPECT_EQ(indexer_loss_forward_path(glm52(), 0, 576), kPlain);
}

TEST(IndexerLossPath, Prints) {
  std::ostringstream out;
  out << kPlain << " " << kWgmma << "; " << indexer_loss_plan(2, 3, 128, 4);
  EXPECT_EQ(out.str(), "plain wgmma; 2 queries at a time, 4096 bytes");
}

// All queries at once, or in chunks of about one size.
TEST(IndexerLossPlan, TakesQueriesInChunks) {
  EXPECT_EQ(indexer_loss_plan(2048, 2048, 128, 1024).chunk, 2048);
  EXPECT_EQ(indexer_loss_plan(2049, 2048, 128, 1024).chunk, 1025);
  EXPECT_EQ(indexer_loss_plan(8192, 8192, 128, 2048).chunk, 1024);
  EXPECT_EQ(indexer_loss_plan(8200, 8192, 128, 2048).chunk, 912);
  // A query whose rows alone do not fit, and none at all.
  EXPECT_EQ(indexer_loss_plan(10, 10, 128, 2048, 100).chunk, 1);
  EXPECT_EQ(indexer_loss_plan(0, 10, 128, 2048).chunk, 1);
  EXPECT_EQ(indexer_loss_plan(100, 10, 128, 0).chunk, 100);
}

TEST(IndexerLossPlan, PartsDoNotOverlap) {
  for (int64_t tokens : {1, 7, 1024, 1025, 8192}) {
    for (int64_t selected : {1, 2048}) {
      const int64_t keys = 1001, dim = 64;
      const IndexerLossPlan p =
          indexer_loss_plan(tokens, keys, dim, selected, 1 << 29);
      const auto size = [](int64_t n) { return static_cast<size_t>(n); };
      // Sums are kept only from one chunk to the next.
      EXPECT_EQ(p.rows - p.sums, p.chunk < tokens ? size(keys * dim * 4) : 0u);
      EXPECT_GE(p.bytes, p.rows + size(p.chunk * selected * dim * 4));
      EXPECT_EQ(p.rows % 16, 0u);
      EXPECT_EQ(p.bytes % 16, 0u);
    }
  }
}

}  // namespace
}  // namespace tapeline::cuda
