// Benches of ops that add to their output judge a right kernel right, however
// many launches were timed: shapes are small, so that these are many.
#include <sstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/bench/bench.h"

namespace tapeline::bench {
namespace {

void expect_right(const std::string& op, const std::string& shape) {
  for (const std::string dtype : {"f32", "bf16", "f64"}) {
    std::vector<std::string> words = {"bench", op, "--shape=" + shape,
                                      "--device=cpu", "--dtype=" + dtype};
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    std::ostringstream out, err;
    EXPECT_EQ(run(static_cast<int>(argv.size()), argv.data(), out, err), 0)
        << dtype << " " << err.str() << out.str();
  }
}

TEST(Sums, RmsNorm) { expect_right("rmsnorm_bwd", "64x32"); }
TEST(Sums, LayerNorm) { expect_right("layernorm_bwd", "64x32"); }
TEST(Sums, Embedding) { expect_right("embedding_bwd", "64x16x8"); }
TEST(Sums, GroupedWgrad) { expect_right("grouped_wgrad", "2x16x8x16"); }
TEST(Sums, LinearCrossEntropy) { expect_right("linear_ce_fwdbwd", "8x16x32"); }
TEST(Sums, Experts) { expect_right("moe_ffn_fwdbwd", "16x2x4x16x8"); }

}  // namespace
}  // namespace tapeline::bench
