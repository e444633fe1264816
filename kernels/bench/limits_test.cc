// What every op's bench takes at most, and refuses beyond, against the op
// itself: a shape that its CHECKs do not take would end this test.
#include <sstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/bench/bench.h"

namespace tapeline::bench {
namespace {

struct Result {
  int code;
  std::string err;
};
Result run_op(const std::string& op, const std::string& flag) {
  std::vector<std::string> arguments = {"bench", op, "--device=cpu",
                                        "--profile_once", flag};
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  std::ostringstream out, err;
  const int code = run(static_cast<int>(argv.size()), argv.data(), out, err);
  return {code, err.str()};
}

struct Case {
  const char* op;
  const char* taken;
  const char* refused;
  const char* rule;
};
constexpr Case kCases[] = {
    {"adamw", "4x4096", "3x4096", "params is a multiple of tensors"},
    {"clip_grad_norm", "4x4096", "3x4096", "params is a multiple of tensors"},
    {"sdpa_causal_fwd", "4x2x64x64x64", "4x3x64x64x64",
     "Hq is a multiple of Hk"},
    {"sdpa_causal_fwd", "1x1x640x64x64", "1x1x641x64x64", "dqk is at most 640"},
    {"sdpa_causal_bwd", "1x1x64x640x64", "1x1x64x641x64", "dv is at most 640"},
    {"balance_fwd", "64x1024", "64x1025", "E is at most 1024"},
    {"balance_bwd", "64x1024", "64x1025", "E is at most 1024"},
    {"moe_ffn_fwd", "64x8x8x64x64", "64x9x8x64x64", "k is at most E"},
    {"moe_ffn_fwd", "8x64x65x64x64", "8x65x65x64x64", "k is at most 64"},
    {"moe_ffn_fwdbwd", "8x2x1024x64x64", "8x2x1025x64x64", "E is at most 1024"},
    {"dsa_indexer_scores", "4x640x64x64", "4x641x64x64", "d is at most 640"},
    {"dsa_indexer_select", "4x640x64x64x8", "4x641x64x64x8",
     "d is at most 640"},
    {"dsa_indexer_loss_fwd", "4x640x4x64x64x16", "4x641x4x64x64x16",
     "index_d is at most 640"},
    {"dsa_indexer_loss_bwd", "4x64x4x640x64x16", "4x64x4x641x64x16",
     "dqk is at most 640"},
    // A query has at most all keys.
    {"dsa_indexer_loss_fwd", "4x64x4x64x64x9000", "4x64x4x64x9000x9000",
     "topk is at most 8192"},
    {"dsa_indexer_scores", "4x64x64x64", "1x1x1x2147483648",
     "T is at most 2147483647"},
    {"dsa_indexer_select", "4x64x64x64x9000", "1x1x1x1x2147483648",
     "topk is at most 2147483647"},
    {"dsa_indexer_loss_bwd", "4x64x4x64x64x16", "1x1x1x1x300000x8192",
     "S is at most 262143"},
    {"dsa_topk", "64x512x64", "1x1x2147483648", "k is at most 2147483647"},
    {"dsa_topk", "64x512x600", "1x2147483648x1", "T is at most 2147483647"},
    {"combine_fwd", "64x64x8", "268435456x1x8", "T is at most 268435455"},
    {"permute_bwd", "64x64x8", "268435456x1x8", "T is at most 268435455"},
    {"moe_ffn_fwd", "64x2x8x64x64", "1073741824x2x8x1x1",
     "T is at most 1073741823"},
    {"rope_bwd", "64x4x64", "1x1x2147483648", "d is at most 2147483647"},
    {"rope_fwd", "64x4x64", "64x4x63", "d is even"},
    {"rope_bwd", "64x4x64", "64x4x63", "d is even"},
    {"route_sort_index", "64x12800x2", "64x12801x2", "E is at most 12800"},
    {"route_sort_index", "64x8x2", "1073741824x8x2", "T is at most 1073741823"},
    {"router_topk", "64x1024x8x0", "64x1025x8x0", "E is at most 1024"},
    {"router_topk", "64x256x64x0", "64x256x65x0", "k is at most 64"},
    {"router_topk", "64x64x8x64", "64x64x8x24", "E is a multiple of groups"},
    {"router_topk", "64x128x8x128", "64x256x8x256", "groups is at most 128"},
    {"router_bwd", "64x256x64x0", "64x4x5x0", "k is at most E"},
    {"sparse_mla_fwd", "4x64x64x16x640x640", "4x64x64x16x641x64",
     "dqk is at most 640"},
    {"sparse_mla_bwd", "4x64x64x16x64x64", "4x64x64x16x64x65",
     "dv is at most dqk"},
    {"invert_ids", "4x64x64x16x64x64", "4x134217728x64x16x64x64",
     "S is at most 134217727"},
};

TEST(BenchLimits, AreThoseOfTheOps) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.op);
    const Result taken = run_op(c.op, std::string("--shape=") + c.taken);
    EXPECT_EQ(taken.code, 0) << c.taken << ": " << taken.err;
    const Result refused = run_op(c.op, std::string("--shape=") + c.refused);
    EXPECT_EQ(refused.code, 64) << c.refused;
    EXPECT_EQ(refused.err,
              std::string("--shape: ") + c.rule + " for " + c.op + "\n");
  }
}

TEST(BenchLimits, TypesAreThoseOfTheOps) {
  for (const char* op : {"adamw", "clip_grad_norm", "balance_fwd", "cast",
                         "muon_orthogonalize", "router_topk", "router_bwd"}) {
    EXPECT_EQ(run_op(op, "--dtype=bf16").err,
              std::string("--dtype=bf16: ") + op + " takes f32\n");
  }
  EXPECT_EQ(run_op("dsa_topk", "--dtype=bf16").err,
            "--dtype=bf16: dsa_topk takes f32 or f64\n");
  for (const char* op : {"route_sort_index", "h2d_pinned"}) {
    EXPECT_EQ(run_op(op, "--dtype=f32").err,
              std::string("--dtype=f32: ") + op + " has no type\n");
  }
}

}  // namespace
}  // namespace tapeline::bench
