// A steady step on a GPU: the host neither waits for the device nor asks it for
// memory, and its steps are those of a host that waits after each.
#include <string>

#include "gtest/gtest.h"
#include "tests/cli/child.h"
#include "tests/cli/expect.h"

namespace tapeline {
namespace {

// Steps without hashes: those read every tensor.
Words train(const TempFolder& folder, const std::string& name,
            const Words& sets) {
  Words words = {"train",
                 "--config",
                 small_config(folder),
                 "--set=device=cuda",
                 "--set=train.steps=12",
                 "--set=train.snapshot_every=0",
                 "--set=train.eval_every=0",
                 "--set=debug.hash_every=0",
                 "--set=run.name=" + name};
  for (const std::string& set : sets) words.push_back("--set=" + set);
  return words;
}

int64_t count(const Json& json, const char* key) {
  return json.find(key)->integer();
}

class SteadyStep : public testing::TestWithParam<Words> {};

TEST_P(SteadyStep, NeitherWaitsNorAllocates) {
  const TempFolder folder;
  Words sets = GetParam();
  sets.push_back("debug.cuda_first=5");
  sets.push_back("debug.cuda_last=10");
  const ChildResult r = tapeline_run(train(folder, "steady", sets));
  ASSERT_EQ(r.code, 0) << r.err;
  const Json json = read_json(folder / "runs/steady/cuda.json").value();
  EXPECT_EQ(count(json, "first_step"), 5);
  EXPECT_EQ(count(json, "last_step"), 10);
  for (const char* key : {"synchronizations", "allocations", "frees",
                          "creations", "pageable_copies"}) {
    EXPECT_EQ(count(json, key), 0) << json.dump(2);
  }
  // It was watched: thousands of launches, and copies of batches and losses.
  EXPECT_GT(count(json, "launches"), 1000);
  EXPECT_GT(count(json, "copies"), 6 * 3);
  EXPECT_FALSE(json.find("largest")->array().empty());
}

INSTANTIATE_TEST_SUITE_P(, SteadyStep,
                         testing::Values(Words{}, Words{"optimizer.name=adamw"},
                                         Words{"compute_dtype=bf16"},
                                         Words{"recompute.policy=full",
                                               "offload.activations=true",
                                               "offload.ids=true"}));

// A monitor that sees nothing would pass the test above.
TEST(Watching, FindsWhatAFirstStepAsksFor) {
  const TempFolder folder;
  const ChildResult r = tapeline_run(
      train(folder, "first", {"debug.cuda_first=1", "train.steps=2"}));
  ASSERT_EQ(r.code, 0) << r.err;
  const Json json = read_json(folder / "runs/first/cuda.json").value();
  EXPECT_GT(count(json, "allocations"), 10);
  // A hash reads every gradient.
  const ChildResult hashed = tapeline_run(
      train(folder, "hashed", {"debug.cuda_first=3", "debug.hash_every=1"}));
  ASSERT_EQ(hashed.code, 0) << hashed.err;
  EXPECT_GT(count(read_json(folder / "runs/hashed/cuda.json").value(),
                  "synchronizations"),
            10);
}

// Evaluating after every step makes the host wait there; numbers are the same.
TEST(SteadySteps, AreThoseOfAHostThatWaits) {
  const TempFolder folder;
  ASSERT_EQ(tapeline_run(train(folder, "ahead", {})).code, 0);
  ASSERT_EQ(tapeline_run(train(folder, "waits", {"train.eval_every=1"})).code,
            0);
  int steps = 0;
  const std::vector<Json> waits = lines_of(folder / "runs/waits/metrics.jsonl");
  size_t at = 0;
  for (const Json& row : lines_of(folder / "runs/ahead/metrics.jsonl")) {
    if (row.find("loss") == nullptr) continue;
    while (waits[at].find("loss") == nullptr) ++at;
    for (const char* key : {"step", "loss", "lm_loss", "indexer_loss",
                            "grad_norm", "tokens", "skipped"}) {
      EXPECT_EQ(row.find(key)->dump(), waits[at].find(key)->dump()) << key;
    }
    ++at;
    ++steps;
  }
  EXPECT_EQ(steps, 12);
}

}  // namespace
}  // namespace tapeline
