#include "tools/train/pipeline_plan.h"

#include <algorithm>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tools/train/run_options.h"

namespace tapeline {
namespace {

absl::StatusOr<PipelinePlan> try_plan(const std::vector<std::string>& sets,
                                      int processes,
                                      const std::string& file = "") {
  std::vector<std::string> all = {"model.model_type=qwen3",
                                  "model.vocab_size=8",
                                  "model.hidden_size=8",
                                  "model.num_hidden_layers=5",
                                  "model.num_attention_heads=2",
                                  "model.num_key_value_heads=1",
                                  "model.head_dim=4",
                                  "model.intermediate_size=8",
                                  "model.max_position_embeddings=8",
                                  "model.tie_word_embeddings=true",
                                  "model.hidden_act=silu",
                                  "model.rms_norm_eps=1e-6",
                                  "model.rope_theta=10000.0"};
  all.insert(all.end(), sets.begin(), sets.end());
  const absl::StatusOr<Config> config = load_config("", all);
  EXPECT_TRUE(config.ok()) << config.status();
  const auto model = make_language_model(model_config(*config, "").value(),
                                         model_choices(*config));
  EXPECT_TRUE(model.ok()) << model.status();
  return plan_pipeline(*config, **model, processes, file);
}

PipelinePlan plan(const std::vector<std::string>& sets, int processes) {
  const absl::StatusOr<PipelinePlan> made = try_plan(sets, processes);
  EXPECT_TRUE(made.ok()) << made.status();
  return *made;
}

TEST(Plan, FewerRanksThanProcessesAreReplicas) {
  const PipelinePlan p = plan({"pipeline.ranks=2", "train.micro_batches=6"}, 6);
  EXPECT_EQ(p.mesh, (MeshPoint{.pp = 2, .dp = 3}));
  EXPECT_EQ(p.schedule.micro_batches, 2);
  EXPECT_EQ(p.owner.at("model.embed_tokens.weight"), 0);
  EXPECT_EQ(p.owner.at("model.norm.weight"), 1);
  // A tied head is on the last stage too.
  ASSERT_EQ(p.schedule.groups.size(), 1u);
  EXPECT_EQ(p.schedule.groups[0].stages, (std::vector<int>{0, 1}));
}

// A file of two ranks and three micro-batches.
std::string write_schedule(const std::string& lines) {
  std::string path = testing::TempDir() + "/schedule.txt";
  std::ofstream(path) << "schedule v1 ranks 2 stages 2 micro_batches 3 "
                         "placement 0 1\n"
                      << lines;
  return path;
}

// Sums in another order have other bits than one process.
TEST(Plan, AFileMustAddGradientsInOneOrder) {
  const auto refusal = [](const std::string& lines) {
    const auto made = try_plan({"pipeline.file=x", "train.micro_batches=3"}, 2,
                               write_schedule(lines));
    return std::string(made.status().message());
  };
  const std::string last = "rank 1: 1F0 1F1 1F2 1I0 1I2 1I1 1W0 1W1 1W2\n";
  EXPECT_EQ(refusal("rank 0: 0F0 0F1 0F2 0I0 0I2 0I1 0W0 0W1 0W2\n" + last),
            "");
  EXPECT_TRUE(absl::StrContains(
      refusal("rank 0: 0F0 0F1 0F2 0B0 0B2 0B1\n" + last),
      "schedule.txt: order: rank 0, action 5 (0B1): it comes after that of "
      "micro-batch 2"));
  EXPECT_TRUE(absl::StrContains(
      refusal("rank 0: 0F0 0F1 0F2 0I0 0I2 0I1 0W0 0W2 0W1\n" + last),
      "order: rank 0, action 8 (0W1)"));
}

TEST(Plan, AFileGoesWithNoOtherSchedule) {
  const std::string file = write_schedule(
      "rank 0: 0F0 0F1 0F2 0B0 0B1 0B2\nrank 1: 1F0 1B0 1F1 1B1 1F2 1B2\n");
  const auto refusal = [&](const std::vector<std::string>& sets) {
    std::vector<std::string> all = {"pipeline.file=x", "train.micro_batches=3"};
    all.insert(all.end(), sets.begin(), sets.end());
    return std::string(try_plan(all, 2, file).status().message());
  };
  EXPECT_EQ(refusal({}), "");
  EXPECT_EQ(refusal({"pipeline.schedule=zbv"}),
            "pipeline.file and pipeline.schedule both say what a rank runs; "
            "leave one of them out");
  EXPECT_TRUE(absl::StrContains(refusal({"pipeline.chunks=2"}),
                                "pipeline.file and pipeline.chunks"));
}

// The order in which a file lists stages says nothing.
TEST(Plan, GroupsOfAFileAreThoseOfTheModel) {
  const std::string ranks =
      "rank 0: 0F0 0F1 0F2 0B0 0B1 0B2\nrank 1: 1F0 1B0 1F1 1B1 1F2 1B2\n";
  const std::vector<std::string> sets = {"pipeline.file=x",
                                         "train.micro_batches=3"};
  EXPECT_TRUE(
      try_plan(sets, 2, write_schedule("group tied 1 0\n" + ranks)).ok());
  const auto none = try_plan({"pipeline.file=x", "train.micro_batches=3",
                              "model.tie_word_embeddings=false"},
                             2, write_schedule("group tied 1 0\n" + ranks));
  EXPECT_TRUE(absl::StrContains(none.status().message(), "none do"));
}

// A communicator that makes its channels at the start has all that a rank's
// program uses, each once.
TEST(Plan, EveryMessageHasARoute) {
  for (const char* schedule : {"1f1b", "zbv", "looped_bfs"}) {
    const PipelinePlan p = plan({std::string("pipeline.schedule=") + schedule,
                                 "pipeline.ranks=2", "train.micro_batches=4"},
                                4);
    std::set<std::string> routes;
    for (const NcclRoute& r : routes_of(p)) {
      EXPECT_TRUE(routes
                      .insert(std::to_string(r.from) + ">" +
                              std::to_string(r.to) + ":" +
                              std::to_string(r.channel))
                      .second);
      EXPECT_NE(r.from, r.to);
    }
    size_t messages = 0;
    for (int rank = 0; rank < 4; ++rank) {
      const MeshPoint here = place_of(p.mesh, rank);
      for (const Instruction& i : p.programs[here.pp].instructions) {
        if (i.kind != Instruction::kSend && i.kind != Instruction::kTake) {
          continue;
        }
        MeshPoint place = here;
        place.pp = i.peer;
        const int peer = rank_of(p.mesh, place);
        const bool sends = i.kind == Instruction::kSend;
        EXPECT_TRUE(routes.contains(std::to_string(sends ? rank : peer) + ">" +
                                    std::to_string(sends ? peer : rank) + ":" +
                                    std::to_string(channel_of(i.value))))
            << schedule << ": " << to_string(i);
        ++messages;
      }
    }
    EXPECT_GE(messages, 16u);
  }
  const std::vector<std::vector<int>> want = {
      {0, 1, 2, 3}, {0, 2}, {1, 3}, {0, 1}, {2, 3}};
  EXPECT_EQ(groups_of(plan({"pipeline.ranks=2", "train.micro_batches=4"}, 4)),
            want);
  EXPECT_EQ(groups_of(plan({}, 2)), (std::vector<std::vector<int>>{{0, 1}}));
}

}  // namespace
}  // namespace tapeline
