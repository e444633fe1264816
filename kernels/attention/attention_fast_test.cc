#include "kernels/attention/attention_fast.h"

#include <array>
#include <sstream>

#include "gtest/gtest.h"

namespace tapeline::cuda {
namespace {

constexpr auto kPlain = AttentionPath::kPlain;
constexpr auto kWgmma = AttentionPath::kWgmma;

// Qwen3-30B at 16384 tokens.
AttentionOperands qwen3() {
  return {.bf16 = true,
          .tokens = 16384,
          .keys = 16384,
          .heads = 32,
          .groups = 4,
          .dim = 128,
          .v_dim = 128,
          .scale = 0.088,
          .aligned = true};
}

TEST(AttentionPath, ModelsRunOnTensorCores) {
  EXPECT_EQ(attention_path(qwen3()), kWgmma);
  for (const auto& [dim, v_dim, heads, groups] :
       {std::array<int64_t, 4>{128, 128, 64, 4},
        {192, 128, 128, 128},
        {256, 256, 64, 64}}) {
    AttentionOperands x = qwen3();
    x.dim = dim;
    x.v_dim = v_dim;
    x.heads = heads;
    x.groups = groups;
    EXPECT_EQ(attention_path(x), kWgmma) << dim << " " << v_dim;
  }
}

TEST(AttentionPath, OtherHeadSizesArePlain) {
  for (const auto& [dim, v_dim] : {std::array<int64_t, 2>{64, 64},
                                   {80, 64},
                                   {128, 64},
                                   {192, 192},
                                   {256, 128},
                                   {129, 128},
                                   {512, 512}}) {
    AttentionOperands x = qwen3();
    x.dim = dim;
    x.v_dim = v_dim;
    EXPECT_EQ(attention_path(x), kPlain) << dim << " " << v_dim;
  }
}

TEST(AttentionPath, DtypeAlignmentAndScaleDecide) {
  AttentionOperands x = qwen3();
  x.bf16 = false;
  EXPECT_EQ(attention_path(x), kPlain);
  x = qwen3();
  x.aligned = false;
  EXPECT_EQ(attention_path(x), kPlain);
  for (double scale : {0.0, -0.1}) {
    x = qwen3();
    x.scale = scale;
    EXPECT_EQ(attention_path(x), kPlain) << scale;
  }
}

TEST(AttentionPath, NothingToDoIsPlain) {
  for (auto size : {&AttentionOperands::tokens, &AttentionOperands::keys,
                    &AttentionOperands::heads, &AttentionOperands::groups}) {
    AttentionOperands x = qwen3();
    x.*size = 0;
    EXPECT_EQ(attention_path(x), kPlain);
  }
}

// A token decoded with a cache takes the way of the whole sequence.
TEST(AttentionPath, TokensHaveNoSay) {
  AttentionOperands x = qwen3();
  x.tokens = 1;
  EXPECT_EQ(attention_path(x), kWgmma);
}

TEST(AttentionPath, CoordinatesFitInt32) {
  constexpr int64_t kMost = int64_t{1} << 30;
  AttentionOperands x = qwen3();
  x.heads = x.groups = 1;
  x.tokens = kMost - 1;
  EXPECT_EQ(attention_path(x), kWgmma);
  x.tokens = kMost;
  EXPECT_EQ(attention_path(x), kPlain);
  x = qwen3();
  x.groups = 1;
  x.keys = kMost - 1;
  EXPECT_EQ(attention_path(x), kWgmma);
  x.keys = kMost;
  EXPECT_EQ(attention_path(x), kPlain);
  // Tiles of all heads.
  x = qwen3();
  x.heads = 128;
  x.tokens = kMost / 2;
  EXPECT_EQ(attention_path(x), kPlain);
  x.heads = 64;
  x.tokens = kMost - 64;
  EXPECT_EQ(attention_path(x), kPlain);
  x = qwen3();
  x.groups = 128;
  x.keys = kMost / 2;
  EXPECT_EQ(attention_path(x), kPlain);
}

TEST(AttentionPath, Prints) {
  std::ostringstream out;
  out << kPlain << " " << kWgmma << " " << attention_backward_plan(129, 2);
  EXPECT_EQ(out.str(), "plain wgmma 256 queries, 6272 bytes");
}

TEST(AttentionBackwardPlan, PartsDoNotOverlap) {
  for (int64_t tokens : {1, 127, 128, 129, 40000}) {
    for (int64_t heads : {1, 3, 128}) {
      const AttentionBackwardPlan p = attention_backward_plan(tokens, heads);
      EXPECT_GE(p.padded, tokens);
      EXPECT_EQ(p.padded % 128, 0);
      EXPECT_EQ(p.rows, 0u);
      EXPECT_GE(p.ranges, p.rows + static_cast<size_t>(heads * p.padded * 8));
      EXPECT_GE(p.tiles, p.ranges + static_cast<size_t>(p.padded * 8));
      EXPECT_GE(p.bytes, p.tiles + static_cast<size_t>(p.padded / 64 * 16));
      for (size_t at : {p.ranges, p.tiles, p.bytes}) EXPECT_EQ(at % 16, 0u);
    }
  }
}

}  // namespace
}  // namespace tapeline::cuda
