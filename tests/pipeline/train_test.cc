// `tapeline train` over processes, from outside: the built binary, its metrics
// and its files. The reference is the run of one process with the whole model.
#include <algorithm>
#include <csignal>
#include <set>
#include <string>
#include <vector>

#include "tests/pipeline/train_run.h"

namespace tapeline {
namespace {

struct Way {
  const char* name;
  int processes;
  Words sets;
};

// Every row of a pipeline has what the plain loop has, and says how idle it
// was; it did run the schedule.
void expect_pipelined(const std::string& run, const std::string& schedule) {
  int steps = 0;
  for (const Json& row : rows(run)) {
    if (row.find("loss") == nullptr) continue;
    ++steps;
    for (const char* key : {"bubble_measured", "bubble_simulated"}) {
      ASSERT_TRUE(row.find(key)->is_number()) << row.dump();
      EXPECT_GE(row.find(key)->number(), 0);
      EXPECT_LT(row.find(key)->number(), 1);
    }
  }
  for (const Json& row : rows(run)) {
    if (row.find("loss") == nullptr) continue;
    EXPECT_GT(row.find("pipeline_ms")->number(), 0);
    // The host moves messages here.
    EXPECT_TRUE(row.find("messages_exposed_ms")->is_null());
    const Json::Array& peaks = row.find("rank_peak_bytes")->array();
    ASSERT_GT(peaks.size(), 0u);
    EXPECT_EQ(peaks[0].integer(), row.find("pool_peak_bytes")->integer());
    for (const Json& peak : peaks) EXPECT_GT(peak.integer(), 0);
  }
  EXPECT_GT(steps, 0);
  EXPECT_NE(read_file(run + "/log.txt")->find("pipeline: " + schedule + ", "),
            std::string::npos);
}

class Equality : public Train {
 protected:
  void compare(const Words& common, const std::vector<Way>& ways) {
    const std::vector<std::string> want = reference("one", common);
    const auto exported = tensors(run("one") + "/hf");
    for (const Way& way : ways) {
      SCOPED_TRACE(std::string(way.name) + " x " +
                   std::to_string(way.processes));
      std::string name = "w" + std::to_string(++runs_);
      const ChildResult r =
          train(name, way.processes,
                common + way.sets +
                    Words{std::string("pipeline.schedule=") + way.name});
      ASSERT_EQ(r.code, 0) << r.err;
      expect_same(lasting(run(name)), want);
      EXPECT_EQ(tensors(run(name) + "/hf"), exported);
      expect_pipelined(run(name), way.name);
    }
  }
  int runs_ = 0;
};

TEST_F(Equality, EverySchedulesStepsHaveTheHashesOfThePlainLoop) {
  compare({"train.steps=3", "train.micro_batches=4", "train.max_norm=0.1"},
          {{"1f1b", 2, {}},
           {"gpipe", 2, {}},
           {"interleaved", 2, {"pipeline.chunks=2"}},
           {"zb1p", 2, {"recompute.policy=full"}},
           {"zbv", 2, {"recompute.policy=every_n", "recompute.every=2"}},
           {"v_half", 2, {}},
           {"dualpipev", 2, {}},
           {"zb_h2", 4, {}},
           {"interleaved", 4, {"pipeline.chunks=2"}},
           {"v_min", 4, {"recompute.policy=full"}},
           {"1f1b", 4, {"pipeline.layout=E|tt|tm|L"}},
           {"interleaved", 1, {"pipeline.chunks=2"}}});
}

TEST_F(Equality, TiedHeadAndTwoPredictionDepths) {
  compare({"train.steps=3", "train.micro_batches=4",
           "model.tie_word_embeddings=true", "loss.mtp_depths=2",
           "optimizer.name=adamw"},
          {{"1f1b", 2, {}},
           {"zbv", 2, {}},
           {"looped_bfs", 2, {"pipeline.chunks=2"}},
           {"zb1p", 4, {"recompute.policy=full"}},
           {"1f1b", 4, {"pipeline.layout=Et|tt|mm|L"}}});
}

TEST_F(Equality, WhatDepthsStartFromIsWhereTheyAre) {
  compare({"train.steps=2", "train.micro_batches=3", "loss.mtp_after_norm=true",
           "offload.activations=true", "offload.ids=true"},
          {{"1f1b", 3, {"pipeline.layout=Et|ttm|L"}},
           {"gpipe", 2, {"recompute.policy=full"}}});
}

TEST_F(Equality, AScheduleFileRunsAsTheOneItWasMadeFrom) {
  const ChildResult text =
      tapeline_run({"schedule", "--name", "eager_1f1b", "--ranks", "2",
                    "--micro_batches", "4"});
  ASSERT_EQ(text.code, 0) << text.err;
  const std::string file = folder_.write("schedule.txt", text.out);
  const Words sets = {"train.steps=2", "train.micro_batches=4"};
  const std::vector<std::string> want = reference("one", sets);
  const ChildResult r = train("file", 2, sets + Words{"pipeline.file=" + file});
  ASSERT_EQ(r.code, 0) << r.err;
  expect_same(lasting(run("file")), want);
  expect_pipelined(run("file"), file);
}

TEST_F(Train, TheStepLineHasLossBubbleAndTokensOnce) {
  const ChildResult r = train("line", 2, {"train.steps=2"});
  ASSERT_EQ(r.code, 0) << r.err;
  int lines = 0;
  std::istringstream out(r.out);
  for (std::string line; std::getline(out, line);) {
    if (line.find("step ") == std::string::npos ||
        line.find("loss ") == std::string::npos ||
        line.find("val") != std::string::npos) {
      continue;
    }
    ++lines;
    EXPECT_EQ(line.rfind("0 | step ", 0), 0u) << line;
    EXPECT_NE(line.find(" % (sim "), std::string::npos) << line;
    EXPECT_NE(line.find("tok/s"), std::string::npos) << line;
  }
  EXPECT_EQ(lines, 2);
  for (const Json& row : rows(run("line"))) {
    if (row.find("loss") == nullptr) continue;
    const double tokens =
        row.find("tokens_per_s")->number() * row.find("step_ms")->number();
    EXPECT_NEAR(tokens / 1000, 2 * 64, 1e-6 * 2 * 64);
  }
}

// --- Replicas

TEST_F(Train, B18_ReplicasOfPipelinesHaveTheBitsOfReplicasOfOneRank) {
  const Words sets = {"train.steps=3", "train.micro_batches=4",
                      "train.max_norm=0.1", "model.tie_word_embeddings=true"};
  const Words one = reference("one", sets);
  const auto replicas = [&](const std::string& name, int processes,
                            const Words& more) {
    const ChildResult r = train(name, processes, sets + more);
    EXPECT_EQ(r.code, 0) << r.err;
    return lasting(run(name));
  };
  const Words two = replicas("two", 2, {"pipeline.ranks=1"});
  expect_same(replicas("again", 2, {"pipeline.ranks=1"}), two);
  expect_same(replicas("four", 4, {"pipeline.ranks=2"}), two);
  expect_same(replicas("zbv", 4,
                       {"pipeline.ranks=2", "pipeline.schedule=zbv",
                        "recompute.policy=full"}),
              two);
  // Before the first update the losses are one device's, bit for bit; the
  // gradients are added in another order.
  const Json a = parse_json(one[0], "row").value();
  const Json b = parse_json(two[0], "row").value();
  for (const char* key : {"loss", "mtp_loss", "balance_loss", "z_loss"}) {
    EXPECT_EQ(*a.find(key), *b.find(key)) << key;
  }
  EXPECT_NEAR(a.find("grad_norm")->number(), b.find("grad_norm")->number(),
              1e-5 * a.find("grad_norm")->number());
  EXPECT_NE(*a.find("grad_hash"), *b.find("grad_hash"));
  EXPECT_EQ(tensors(run("four") + "/hf"), tensors(run("two") + "/hf"));
}

// --- Snapshots

// Of {1, 2, 4} ranks with {1, 2} stages each, and of two replicas.
const std::vector<Way>& layouts() {
  static const std::vector<Way>& all =
      *new std::vector<Way>{{"1f1b", 0, {}},
                            {"interleaved", 1, {"pipeline.chunks=2"}},
                            {"1f1b", 2, {}},
                            {"zbv", 2, {}},
                            {"1f1b", 4, {"pipeline.layout=Et||tt|mL"}},
                            {"interleaved", 4, {"pipeline.chunks=2"}}};
  return all;
}

TEST_F(Train, B41_B46_F06_AnyLayoutGoesOnWithTheSnapshotOfAnyOther) {
  // Sizes that nothing divides.
  const Words sets = {"train.micro_batches=4", "model.intermediate_size=47",
                      "model.moe_intermediate_size=23",
                      "data.val=", "train.snapshot_every=0"};
  const Words want = reference("one", sets + Words{"train.steps=4"});
  ASSERT_EQ(want.size(), 4u);
  int from = 0;
  std::set<std::string> hashes;
  for (const Way& a : layouts()) {
    const std::string first = "from" + std::to_string(++from);
    const ChildResult r = train(
        first, a.processes,
        sets + a.sets +
            Words{"train.steps=2", std::string("pipeline.schedule=") + a.name});
    ASSERT_EQ(r.code, 0) << r.err;
    const std::string snapshot = run(first) + "/snapshots/step_0000002";
    // The same tensors, whoever wrote them.
    std::string all;
    for (const auto& [name, bytes] : tensors(snapshot)) all += name + bytes;
    hashes.insert(all);
    int to = 0;
    for (const Way& b : layouts()) {
      SCOPED_TRACE(std::string(a.name) + " x " + std::to_string(a.processes) +
                   " -> " + b.name + " x " + std::to_string(b.processes));
      const std::string name = first + "to" + std::to_string(++to);
      const ChildResult then =
          train(name, b.processes,
                sets + b.sets +
                    Words{"train.steps=4",
                          std::string("pipeline.schedule=") + b.name},
                {"--resume=" + snapshot});
      ASSERT_EQ(then.code, 0) << then.err;
      expect_same(lasting(run(name)), {want[2], want[3]});
    }
  }
  EXPECT_EQ(hashes.size(), 1u);
}

// Every process is killed at its k-th call that changes files: the leader
// first, which makes most of them.
TEST_F(Train, AKilledSaveLeavesTheSnapshotBefore) {
  const Words sets = {"train.steps=6", "data.val="};
  const Words want = reference("one", sets);
  int killed = 0;
  for (int k = 20;; k += 67) {
    SCOPED_TRACE(k);
    ASSERT_TRUE(remove_path(run("killed")).ok());
    ChildOptions options;
    options.environment["TAPELINE_FAULT"] = "kill:" + std::to_string(k);
    const ChildResult r = train("killed", 2, sets, {}, options);
    if (r.code == 0) break;
    EXPECT_EQ(r.code, 128 + SIGKILL);
    ++killed;
    ChildResult then = train("killed", 2, sets, {"--resume"});
    // Ended before its first snapshot: it begins again.
    if (then.code == 75) then = train("killed", 2, sets);
    ASSERT_EQ(then.code, 0) << then.err;
    expect_same(lasting(run("killed")), want);
    for (const auto& [path, bytes] : files_below(run("killed"))) {
      EXPECT_EQ(path.find(".tmp-"), std::string::npos) << path;
    }
  }
  EXPECT_GE(killed, 3);
}

TEST_F(Train, AStopIsSavedAndGoesOnOverAnotherNumberOfProcesses) {
  const Words sets = {"train.steps=300", "data.val=", "train.snapshot_every=0"};
  Child child(words("stopped", 2, sets));
  const std::string metrics = run("stopped") + "/metrics.jsonl";
  while (child.running()) {
    const auto text = read_file(metrics);
    if (text.ok() && std::count(text->begin(), text->end(), '\n') >= 3) break;
    usleep(20000);
  }
  child.send(SIGTERM);
  const ChildResult r = child.wait();
  EXPECT_EQ(r.code, 143) << r.err;
  const size_t done = rows(run("stopped")).size();
  ASSERT_GE(done, 3u);
  ASSERT_LT(done, 300u);
  const Words two = {"train.steps=" + std::to_string(done + 2),
                     "data.val=", "train.snapshot_every=0"};
  ASSERT_EQ(train("stopped", 0, two, {"--resume"}).code, 0);
  expect_same(lasting(run("stopped")), reference("one", two));
}

// --- Folders of models

TEST_F(Train, B42_ShardsOfAllRanksAreOneModel) {
  const Words sets = {"train.steps=1", "train.micro_batches=4"};
  ASSERT_EQ(train("one", 0, sets).code, 0);
  ASSERT_EQ(train("four", 4, sets).code, 0);
  const std::string hf = run("four") + "/hf";
  EXPECT_EQ(tensors(hf), tensors(run("one") + "/hf"));
  EXPECT_EQ(read_file(hf + "/config.json").value(),
            read_file(run("one") + "/hf/config.json").value());
  EXPECT_TRUE(path_exists(hf + "/model-00001-of-00004.safetensors"));
  EXPECT_TRUE(path_exists(hf + "/model.safetensors.index.json"));
  const auto eval = [&](const std::string& folder) {
    return tapeline_run({"eval", "--model", folder, "--data",
                         folder_ / "text.txt", "--json"})
        .out;
  };
  EXPECT_EQ(eval(hf), eval(run("one") + "/hf"));

  // Each rank reads what it needs of a folder; more in it is fine.
  const Words from = {"train.steps=2", "train.micro_batches=4",
                      "model.path=" + hf};
  const Words want = reference("from_one", from);
  const ChildResult r = train("from_two", 2, from);
  ASSERT_EQ(r.code, 0) << r.err;
  expect_same(lasting(run("from_two")), want);
  const Words less =
      from + Words{"model.num_nextn_predict_layers=0", "loss.mtp_depths=0"};
  const Words smaller = reference("less_one", less);
  ASSERT_EQ(train("less_two", 2, less).code, 0);
  expect_same(lasting(run("less_two")), smaller);
  // Less is an error, on all ranks the one of the rank that misses it.
  const ChildResult lacks = train(
      "lacks", 2,
      from + Words{"model.num_hidden_layers=4",
                   "model.mlp_layer_types=[\"dense\", \"sparse\", \"sparse\", "
                   "\"sparse\"]",
                   "model.indexer_types=[\"full\", \"full\", \"shared\", "
                   "\"full\"]"});
  EXPECT_EQ(lacks.code, 2);
  EXPECT_NE(lacks.err.find("model.layers."), std::string::npos) << lacks.err;
  EXPECT_FALSE(path_exists(run("lacks")));
}

// --- What it is made of, measured part by part

TEST_F(Train, BenchTimesEachStageAndAScheduleTakesThat) {
  const auto bench = [&](const Words& sets) {
    Words out = {"bench",      "--config",    config_, "--stages",
                 "--warmup=1", "--repeats=3", "--json"};
    for (const std::string& set : sets) out.insert(out.end(), {"--set", set});
    return out;
  };
  const ChildResult r =
      tapeline_run(bench({"pipeline.ranks=2", "pipeline.schedule=zbv"}));
  ASSERT_EQ(r.code, 0) << r.err;
  const Json json = parse_json(r.out, "bench").value();
  EXPECT_EQ(json.find("device")->string(), "cpu");
  const Json::Array& stages = json.find("stages")->array();
  ASSERT_EQ(stages.size(), 4u);
  double all = 0;
  for (const Json& stage : stages) {
    for (const char* pass : {"F", "I", "W", "B"}) {
      EXPECT_GT(stage.find(pass)->number(), 0) << pass;
    }
    all += stage.find("F")->number() + stage.find("B")->number();
  }
  // On one rank nothing is idle: m micro-batches take m times their passes.
  const std::string costs = folder_.write("costs.json", r.out);
  const Words time = {"schedule", "--micro_batches=3", "--stage_cost", costs,
                      "--json"};
  const ChildResult one = tapeline_run(
      time + Words{"--name=interleaved", "--ranks=1", "--chunks=4"});
  ASSERT_EQ(one.code, 0) << one.err;
  const Json simulated = parse_json(one.out, "schedule").value();
  EXPECT_NEAR(simulated.find("makespan")->number(), 3 * all, 1e-6 * all);
  EXPECT_EQ(simulated.find("stage_cost")->array().size(), 4u);
  EXPECT_EQ(simulated.find("cost"), nullptr);
  const ChildResult two = tapeline_run(time + Words{"--name=zbv", "--ranks=2"});
  EXPECT_EQ(two.code, 0) << two.err;
  const ChildResult other =
      tapeline_run(time + Words{"--name=1f1b", "--ranks=2"});
  EXPECT_EQ(other.code, 2);
  EXPECT_NE(other.err.find("has 4 stages; the schedule has 2"),
            std::string::npos)
      << other.err;
  const struct {
    const char* text;
    const char* error;
  } wrong[] = {{"{}", "no array 'stages'"},
               {"{\"stages\": [{\"F\": 1, \"I\": 1}]}", "lacks F, I or W"},
               {"{\"stages\": [{\"F\": -1}]}", "stage 0 has a cost of -1"},
               {"{", "bad.json"}};
  for (const auto& c : wrong) {
    const std::string bad = folder_.write("bad.json", c.text);
    const ChildResult failed =
        tapeline_run({"schedule", "--name=1f1b", "--ranks=1",
                      "--micro_batches=1", "--stage_cost", bad});
    EXPECT_EQ(failed.code, 2);
    EXPECT_NE(failed.err.find(c.error), std::string::npos) << failed.err;
  }
}

TEST_F(Train, BenchExchangesEachMessageThereAndBack) {
  const Words bench = {"bench",
                       "--config",
                       config_,
                       "--messages",
                       "--warmup=1",
                       "--repeats=2",
                       "--json",
                       "--set",
                       "pipeline.chunks=2",
                       "--set",
                       "pipeline.schedule=interleaved"};
  const ChildResult r = tapeline_run(bench + Words{"--nproc", "2"});
  ASSERT_EQ(r.code, 0) << r.err;
  const Json json = parse_json(r.out, "bench").value();
  // Three cuts, both ways; no selection comes back.
  const Json::Array& messages = json.find("messages")->array();
  ASSERT_EQ(messages.size(), 6u);
  double sum = 0;
  for (size_t i = 0; i < messages.size(); ++i) {
    const bool output = i % 2 == 0;
    EXPECT_EQ(messages[i].find("what")->string(),
              (output ? "output " : "gradient ") +
                  std::to_string(i / 2 + (output ? 0 : 1)));
    EXPECT_EQ(messages[i].find("from")->integer(),
              static_cast<int64_t>((i / 2 + (output ? 0 : 1)) % 2));
    EXPECT_GT(messages[i].find("bytes")->integer(), 0);
    EXPECT_GT(messages[i].find("ms")->number(), 0);
    if (output) {
      EXPECT_GE(messages[i].find("bytes")->integer(),
                messages[i + 1].find("bytes")->integer());
    }
    sum += messages[i].find("ms")->number();
  }
  EXPECT_NEAR(json.find("latency")->number(), sum / 6, 1e-9);
  EXPECT_EQ(json.find("sizes")->array()[1].find("bytes")->integer(), 64);
  const ChildResult alone = tapeline_run(bench);
  EXPECT_EQ(alone.code, 64);
  EXPECT_NE(alone.err.find("--messages needs processes"), std::string::npos);
}

}  // namespace
}  // namespace tapeline
