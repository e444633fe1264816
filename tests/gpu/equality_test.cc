// Recomputation, offload, the number of threads and a stop change no bit on the
// fast path either: mini, cut to four layers, in bf16 with real head sizes,
// every loss, gradient and parameter of three or four steps.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/cli/child.h"
#include "tests/cli/expect.h"

namespace tapeline {
namespace {

struct Steps {
  std::vector<std::string> hashes;  // of gradients and parameters, and losses
  int64_t replays = 0, offload_bytes = 0;
};

Steps train(const TempFolder& folder, const std::string& name,
            const Words& sets, const Words& more = {}) {
  const std::string text = folder.write("text.txt", sample_text(2000));
  Words words = {"train", "--config", "configs/mini.toml"};
  for (const std::string& set :
       Words{"device=cuda", "run.dir=" + folder / "runs", "run.name=" + name,
             "data.train=" + text, "data.val=", "train.save=false",
             "train.steps=3", "train.seq_len=2048", "train.micro_batches=2",
             "schedule.warmup_steps=1", "sample.max_tokens=1",
             "debug.hash_every=1", "model.num_hidden_layers=4",
             "model.mlp_layer_types=[\"dense\", \"sparse\", \"sparse\", "
             "\"sparse\"]",
             "model.indexer_types=[\"full\", \"shared\", \"full\", "
             "\"shared\"]"}) {
    words.push_back("--set=" + set);
  }
  for (const std::string& set : sets) words.push_back("--set=" + set);
  const ChildResult r = tapeline_run(words + more);
  EXPECT_EQ(r.code, 0) << r.err;
  Steps steps;
  for (const Json& row :
       lines_of(folder / "runs" + ("/" + name + "/metrics.jsonl"))) {
    if (row.find("loss") == nullptr) continue;
    for (const char* key : {"loss", "grad_norm", "grad_hash", "param_hash"}) {
      steps.hashes.push_back(row.find(key)->dump());
    }
    steps.replays += row.find("replays")->integer();
    steps.offload_bytes += row.find("offload_bytes")->integer();
  }
  return steps;
}

TEST(FastPath, RecomputationAndOffloadChangeNoBit) {
  const TempFolder folder;
  const Steps plain = train(folder, "plain", {});
  ASSERT_EQ(plain.hashes.size(), 3u * 4u);
  EXPECT_EQ(plain.replays, 0);
  EXPECT_EQ(plain.offload_bytes, 0);
  EXPECT_EQ(train(folder, "again", {}).hashes, plain.hashes);
  EXPECT_EQ(train(folder, "thread", {"train.threads=1"}).hashes, plain.hashes);
  const std::string keep =
      "recompute.keep=[\"sparse_attention\", \"grouped_linear\"]";
  const std::vector<std::pair<std::string, Words>> ways = {
      {"full", {"recompute.policy=full"}},
      {"every", {"recompute.policy=every_n", "recompute.every=2"}},
      {"keep", {"recompute.policy=keep", keep}},
      {"activations", {"offload.activations=true", "offload.strict=true"}},
      {"ids", {"offload.ids=true", "offload.strict=true"}},
      {"all",
       {"recompute.policy=full", "offload.activations=true", "offload.ids=true",
        "offload.strict=true"}},
  };
  for (const auto& [name, sets] : ways) {
    SCOPED_TRACE(name);
    const Steps steps = train(folder, name, sets);
    EXPECT_EQ(steps.hashes, plain.hashes);
    // It went another way.
    const bool recomputes = sets[0].starts_with("recompute");
    const bool offloads = sets.back().starts_with("offload");
    EXPECT_EQ(steps.replays > 0, recomputes);
    EXPECT_EQ(steps.offload_bytes > 0, offloads);
  }
}

TEST(FastPath, GoesOnFromASnapshotWithTheSameBits) {
  const TempFolder folder;
  // Rates that do not depend on how many steps there are to be.
  const Words sets = {"schedule.name=constant", "train.save=true"};
  const Steps whole = train(folder, "whole", sets + Words{"train.steps=4"});
  ASSERT_EQ(whole.hashes.size(), 4u * 4u);
  const Steps two = train(folder, "parts", sets + Words{"train.steps=2"});
  EXPECT_EQ(two.hashes.size(), 2u * 4u);
  const Steps parts =
      train(folder, "parts", sets + Words{"train.steps=4"}, {"--resume"});
  EXPECT_EQ(parts.hashes, whole.hashes);
}

}  // namespace
}  // namespace tapeline
