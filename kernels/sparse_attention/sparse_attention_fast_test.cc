#include "kernels/sparse_attention/sparse_attention_fast.h"

#include <sstream>

#include "gtest/gtest.h"

namespace tapeline::cuda {
namespace {

constexpr auto kPlain = SparseAttentionPath::kPlain;
constexpr auto kWgmma = SparseAttentionPath::kWgmma;

SparseAttentionOperands glm5() { return {true, 576, 512, 2048, 0.0625, true}; }

TEST(SparseAttentionPath, AbsorbedMlaRunsOnTensorCores) {
  EXPECT_EQ(sparse_attention_path(glm5()), kWgmma);
  SparseAttentionOperands x = glm5();
  for (int64_t selected : {1, 63, 64, 2047}) {
    x.selected = selected;
    EXPECT_EQ(sparse_attention_path(x), kWgmma) << selected;
  }
}

TEST(SparseAttentionPath, AllElseIsPlain) {
  SparseAttentionOperands x = glm5();
  x.bf16 = false;
  EXPECT_EQ(sparse_attention_path(x), kPlain);
  x = glm5();
  x.dim = 575;
  EXPECT_EQ(sparse_attention_path(x), kPlain);
  x = glm5();
  x.v_dim = 576;
  EXPECT_EQ(sparse_attention_path(x), kPlain);
  x = glm5();
  x.selected = 2049;
  EXPECT_EQ(sparse_attention_path(x), kPlain);
  x = glm5();
  x.scale = 0;
  EXPECT_EQ(sparse_attention_path(x), kPlain);
  x = glm5();
  x.scale = -1;
  EXPECT_EQ(sparse_attention_path(x), kPlain);
  x = glm5();
  x.aligned = false;
  EXPECT_EQ(sparse_attention_path(x), kPlain);
}

TEST(SparseAttentionPath, Prints) {
  std::ostringstream out;
  out << kPlain << " " << kWgmma << "; "
      << sparse_backward_plan(2, 3, 64, 576, 4);
  EXPECT_EQ(out.str(),
            "plain wgmma; 2 queries at a time, 1 blocks of heads, 9296 bytes");
}

// All queries at once, or as many as four to a processor's rows fit.
TEST(SparseBackwardPlan, TakesQueriesInChunks) {
  EXPECT_EQ(sparse_backward_plan(512, 32768, 64, 576, 2048).chunk, 512);
  EXPECT_EQ(sparse_backward_plan(528, 32768, 64, 576, 2048).chunk, 528);
  EXPECT_EQ(sparse_backward_plan(8192, 32768, 64, 576, 2048).chunk, 528);
  EXPECT_EQ(sparse_backward_plan(8192, 32768, 128, 576, 2048).chunk, 264);
  EXPECT_EQ(sparse_backward_plan(8192, 32768, 65, 576, 2048).head_blocks, 2);
  // A query whose rows alone do not fit, and none at all.
  EXPECT_EQ(sparse_backward_plan(10, 10, 64 * 1000, 576, 2048).chunk, 1);
  EXPECT_EQ(sparse_backward_plan(0, 10, 64, 576, 2048).chunk, 1);
  EXPECT_EQ(sparse_backward_plan(100, 10, 64, 576, 0).chunk, 100);
  // Fewer than one for each processor.
  EXPECT_EQ(sparse_backward_plan(500, 10, 64 * 8, 576, 2048).chunk, 69);
}

TEST(SparseBackwardPlan, PartsDoNotOverlap) {
  for (int64_t tokens : {1, 7, 528, 529, 8192}) {
    for (int64_t selected : {1, 2048}) {
      const int64_t keys = 1000;
      const SparseBackwardPlan p =
          sparse_backward_plan(tokens, keys, 64, 576, selected);
      const auto size = [](int64_t n) { return static_cast<size_t>(n); };
      EXPECT_GE(p.slots, p.ids + size(tokens * selected * 4));
      EXPECT_GE(p.counts, p.slots + size(tokens * selected * 2));
      EXPECT_GE(p.next, p.counts + size(tokens * 4));
      EXPECT_GE(p.sums, p.next + size(keys * 4));
      // Sums are kept only from one chunk to the next.
      EXPECT_EQ(p.rows > p.sums, p.chunk < tokens);
      EXPECT_GE(p.bytes, p.rows + size(p.chunk * selected * 576 * 2));
      for (size_t at : {p.slots, p.counts, p.next, p.sums, p.rows, p.bytes}) {
        EXPECT_EQ(at % 16, 0u);
      }
    }
  }
}

}  // namespace
}  // namespace tapeline::cuda
