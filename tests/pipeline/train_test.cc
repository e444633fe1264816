// `tapeline train` over processes, from outside: the built binary, its metrics
// and its files. The reference is the run of one process with the whole model.
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "dist/tcp_store.h"
#include "gtest/gtest.h"
#include "runtime/file.h"
#include "runtime/json.h"
#include "tests/cli/child.h"

namespace tapeline {
namespace {

using Words = std::vector<std::string>;

// What no cut of the model may change.
const Words& lasting_keys() {
  static const Words& keys = *new Words{
      "step",         "loss",     "lm_loss",      "mtp_loss",
      "balance_loss", "z_loss",   "indexer_loss", "lr",
      "grad_norm",    "tokens",   "skipped",      "grad_hash",
      "param_hash",   "val_loss", "val_bytes",    "val_bits_per_byte"};
  return keys;
}

std::vector<Json> rows(const std::string& run) {
  const std::string text = read_file(run + "/metrics.jsonl").value();
  std::istringstream lines(text);
  std::vector<Json> out;
  for (std::string line; std::getline(lines, line);) {
    out.push_back(parse_json(line, "row").value());
  }
  return out;
}

// One line per row of the lasting keys.
std::vector<std::string> lasting(const std::string& run) {
  std::vector<std::string> out;
  for (const Json& row : rows(run)) {
    Json kept = Json::Object();
    for (const std::string& key : lasting_keys()) {
      if (const Json* value = row.find(key)) kept[key] = *value;
    }
    out.push_back(kept.dump());
  }
  return out;
}

void expect_same(const std::vector<std::string>& got,
                 const std::vector<std::string>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) EXPECT_EQ(got[i], want[i]);
}

// Tensors of a folder: name -> dtype, shape, hash of the bytes.
std::map<std::string, std::string> tensors(const std::string& folder) {
  const ChildResult r = tapeline_run({"ckpt", "inspect", folder, "--json"});
  EXPECT_EQ(r.code, 0) << r.err;
  std::map<std::string, std::string> out;
  const Json json = parse_json(r.out, "inspect").value();
  for (const Json& t : json.find("tensors")->array()) {
    out[t.find("name")->string()] = t.find("dtype")->dump() +
                                    t.find("shape")->dump() +
                                    t.find("xxh3")->dump();
  }
  return out;
}

class Seconds {
 public:
  double operator()() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() -
                                         begin_)
        .count();
  }

 private:
  const std::chrono::steady_clock::time_point begin_ =
      std::chrono::steady_clock::now();
};

// Waits for its end that long.
bool ends_within(Child& child, double seconds) {
  const Seconds since;
  while (child.running()) {
    if (since() > seconds) return false;
    usleep(5000);
  }
  return true;
}

// Waits until it is so, or the child has ended.
void wait_until(Child& child, const std::function<bool()>& it_is) {
  while (child.running() && !it_is()) usleep(5000);
}

class Train : public testing::Test {
 protected:
  void SetUp() override { config_ = small_config(folder_); }

  std::string run(const std::string& name) const {
    return folder_ / ("runs/" + name);
  }
  ChildResult train(const std::string& name, int processes, const Words& sets,
                    const Words& more = {}, ChildOptions options = {}) const {
    return tapeline_run(words(name, processes, sets, more), options);
  }
  Words words(const std::string& name, int processes, const Words& sets,
              const Words& more = {}) const {
    Words out = {"train", "--config", config_, "--set", "run.name=" + name};
    if (processes > 0) {
      out.insert(out.end(), {"--nproc", std::to_string(processes)});
    }
    for (const std::string& set : sets) out.insert(out.end(), {"--set", set});
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  // Processes with the variables of torchrun and no launcher; what each has of
  // its own is behind what all have.
  std::vector<std::unique_ptr<Child>> start_job(
      const Words& all, const std::vector<Words>& own) const {
    const std::string port =
        std::to_string(TcpStoreServer::start(0).value()->port());
    std::vector<std::unique_ptr<Child>> out;
    for (size_t r = 0; r < own.size(); ++r) {
      ChildOptions options;
      options.environment = {{"RANK", std::to_string(r)},
                             {"WORLD_SIZE", std::to_string(own.size())},
                             {"LOCAL_RANK", std::to_string(r)},
                             {"MASTER_ADDR", "127.0.0.1"},
                             {"MASTER_PORT", "29500"},
                             {"TAPELINE_STORE_PORT", port}};
      Words words = all;
      words.insert(words.end(), own[r].begin(), own[r].end());
      out.push_back(std::make_unique<Child>(words, options));
    }
    return out;
  }
  // The rows of one process under these settings.
  std::vector<std::string> reference(const std::string& name,
                                     const Words& sets) const {
    const ChildResult r = train(name, 0, sets);
    EXPECT_EQ(r.code, 0) << r.err;
    for (const Json& row : rows(run(name))) {
      const Json* bubble = row.find("bubble_measured");
      EXPECT_TRUE(bubble == nullptr || bubble->is_null());
    }
    return lasting(run(name));
  }

  TempFolder folder_;
  std::string config_;
};

Words operator+(Words a, const Words& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

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

// --- What cannot be

TEST_F(Train, SaysWhatDoesNotFit) {
  const std::string small = folder_.write(
      "small.txt", tapeline_run({"schedule", "--name", "1f1b", "--ranks", "2",
                                 "--micro_batches", "3"})
                       .out);
  const struct {
    int processes;
    Words sets;
    int code;
    const char* error;
  } cases[] = {
      {0, {"pipeline.ranks=2"}, 2, "pipeline.ranks is 2, but there is only 1"},
      {3, {"pipeline.ranks=2"}, 2, "which does not divide 3 processes"},
      {2,
       {"pipeline.ranks=1", "train.micro_batches=3"},
       2,
       "not the same for each of 2 replicas"},
      {2, {"pipeline.schedule=1f1c"}, 2, "did you mean '1f1b'?"},
      {0, {"pipeline.schedule=1f1c"}, 2, "pipeline.schedule is '1f1c'"},
      {2,
       {"pipeline.schedule=zbv", "pipeline.chunks=1"},
       2,
       "pipeline.schedule = zbv: "},
      {2, {"pipeline.schedule=dualpipev"}, 2, "dualpipev"},
      {2,
       {"pipeline.layout=Ettt|m|L"},
       2,
       "has 3 stages, but the schedule has 2"},
      {2, {"pipeline.layout=Ett|mL"}, 2, "pipeline.layout"},
      {2,
       {"pipeline.file=" + small},
       2,
       "is for 3 micro-batches, but a replica"},
      {2, {"pipeline.file=/nowhere"}, 2, "/nowhere"},
      {2, {"offload.warmup_steps=2"}, 2, "offload.warmup_steps"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.error);
    const ChildResult r = train("wrong", c.processes, c.sets);
    EXPECT_EQ(r.code, c.code) << r.err;
    EXPECT_NE(r.err.find(c.error), std::string::npos) << r.err;
    EXPECT_FALSE(path_exists(run("wrong")));
  }
  const ChildResult none =
      tapeline_run(words("wrong", 0, {}, {"--nproc", "0"}));
  EXPECT_EQ(none.code, 64);
  ChildOptions launched;
  launched.environment["RANK"] = "0";
  EXPECT_EQ(train("wrong", 2, {}, {}, launched).code, 64);
}

TEST_F(Train, ADifferenceBetweenRanksIsNamedOnAll) {
  const std::string other = folder_.write("other.txt", sample_text(190));
  const std::string moved = folder_.write("moved.txt", sample_text(200));
  const struct {
    Words own;
    const char* key;
  } cases[] = {
      {{"--set", "optimizer.lr=0.1"}, "optimizer.lr is '0.1"},
      {{"--set", "seed=4"}, "seed is '4', on rank 0 '3'"},
      {{"--set", "data.train=" + other}, "data.train is"},
      {{"--set", "train.save=false"}, "train.save is 'false'"},
      {{"--set", "model.rms_norm_eps=1e-3"}, "model.rms_norm_eps"},
      {{"--set", "pipeline.schedule=zb1p"}, "pipeline.schedule is 'zb1p'"},
      {{"--resume"}, "--resume is 'given"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.key);
    const auto job = start_job(words("differs", 0,
                                     {"train.steps=2", "pipeline.timeout=10",
                                      "pipeline.connect_timeout=10"}),
                               {{}, c.own});
    for (const auto& child : job) {
      const ChildResult r = child->wait();
      EXPECT_EQ(r.code, 2) << r.err;
      EXPECT_NE(r.err.find("rank 1 differs from rank 0"), std::string::npos)
          << r.err;
      EXPECT_NE(r.err.find(c.key), std::string::npos) << r.err;
    }
    EXPECT_FALSE(path_exists(run("differs")));
  }
  // What concerns a process alone, and the same text elsewhere.
  const auto job = start_job(
      words("same", 0, {"train.steps=1"}),
      {{},
       {"--set", "train.threads=2", "--set", "pipeline.timeout=500", "--set",
        "debug.profile=true", "--set", "data.train=" + moved}});
  for (const auto& child : job) EXPECT_EQ(child->wait().code, 0);
}

TEST_F(Train, ASnapshotOfAllRanksMustFit) {
  const std::string runs = folder_ / "runs";
  ASSERT_TRUE(make_directories(runs).ok());
  std::string needs[2];
  for (const int processes : {0, 2}) {
    ChildOptions options;
    options.before_exec = [&] {
      if (unshare(CLONE_NEWNS) != 0 ||
          mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
          mount("none", runs.c_str(), "tmpfs", 0, "size=600k") != 0) {
        _exit(99);
      }
    };
    // The last rank has nearly all of it.
    Words sets = {"model.n_routed_experts=64"};
    if (processes > 0) sets.push_back("pipeline.layout=E|tttmL");
    const ChildResult r = train("full", processes, sets, {}, options);
    if (r.code == 99 || r.code == 128 + 99) {
      std::cerr << "mounting is not permitted here: not tried" << std::endl;
      return;
    }
    EXPECT_EQ(r.code, 74) << r.err;
    const size_t at = r.err.find("snapshots need ");
    ASSERT_NE(at, std::string::npos) << r.err;
    needs[processes / 2] = r.err.substr(at, r.err.find(", but", at) - at);
  }
  EXPECT_EQ(needs[1], needs[0]);
}

TEST_F(Train, NprocCountsInWhatWasStartedByAProcessOfAJob) {
  ChildOptions inherits;
  inherits.environment["TAPELINE_SPAWNED"] = "1";
  const ChildResult r =
      train("nested", 2, {"train.steps=1", "data.val="}, {}, inherits);
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_NE(r.out.find("0 | pipeline: 1f1b, 2 pipeline ranks"),
            std::string::npos)
      << r.out;
}

TEST_F(Train, ALockedFolderEndsAllRanksWithOneReason) {
  Child holder(words("locked", 0, {"train.steps=100000", "data.val="}));
  const std::string metrics = run("locked") + "/metrics.jsonl";
  while (holder.running() && !path_exists(metrics)) usleep(20000);
  const ChildResult r = train("locked", 2, {"train.steps=100000"});
  EXPECT_EQ(r.code, 2) << r.err;
  EXPECT_NE(r.err.find("another process trains in this folder"),
            std::string::npos)
      << r.err;
}

// --- Stops

TEST_F(Train, ABreakInAnEvaluationIsHeardAndTheStepIsSaved) {
  const std::string val = folder_.write("val.txt", sample_text(60000));
  const Words all = words(
      "eval", 0,
      {"data.val=" + val, "train.eval_every=1", "train.snapshot_every=1"});
  for (const int signal : {SIGTERM, SIGKILL}) {
    ASSERT_TRUE(remove_path(run("eval")).ok());
    const auto job = start_job(all, {{}, {}});
    // The step's snapshot is there before its evaluation, which takes long.
    wait_until(*job[0], [&] {
      return path_exists(run("eval") + "/snapshots/step_0000001");
    });
    usleep(500000);
    const Seconds since;
    for (const auto& child : job) child->send(signal);
    for (const auto& child : job) {
      ASSERT_TRUE(ends_within(*child, 20));
      const ChildResult r = child->wait();
      if (signal == SIGTERM) {
        EXPECT_EQ(r.code, 143) << r.err;
      }
    }
    EXPECT_EQ(rows(run("eval")).size(), 1u);
    EXPECT_TRUE(path_exists(run("eval") + "/snapshots/step_0000001"));
  }
}

TEST_F(Train, EveryStepIsEvaluatedOnceWhoeverGoesOn) {
  const std::string val = folder_.write("val.txt", sample_text(2000));
  const Words sets = {"data.val=" + val, "train.eval_every=1",
                      "train.snapshot_every=1"};
  const auto evaluations = [&](const std::string& name) {
    std::vector<std::string> out;
    for (const Json& row : rows(run(name))) {
      if (const Json* loss = row.find("val_loss")) {
        out.push_back(row.find("step")->dump() + " " + loss->dump());
      }
    }
    return out;
  };
  ASSERT_EQ(train("one", 0, sets + Words{"train.steps=4"}).code, 0);
  EXPECT_EQ(evaluations("one").size(), 4u);
  // The step that it goes on from has been evaluated, as rank 0 alone can see.
  ASSERT_EQ(train("two", 2, sets + Words{"train.steps=2"}).code, 0);
  const ChildResult r =
      train("two", 2, sets + Words{"train.steps=4"}, {"--resume"});
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(evaluations("two"), evaluations("one"));
}

TEST_F(Train, AStopIsHeardWhileRanksAreMissing) {
  const auto job = start_job(
      words("alone", 0, {"pipeline.connect_timeout=100"}), {{}, {"--help"}});
  usleep(1500000);
  ASSERT_TRUE(job[0]->running());
  job[0]->send(SIGTERM);
  ASSERT_TRUE(ends_within(*job[0], 10));
  const ChildResult r = job[0]->wait();
  EXPECT_EQ(r.code, 143) << r.err;
  EXPECT_NE(r.err.find("stopped by SIGTERM before the first step"),
            std::string::npos)
      << r.err;
}

// --- Faults

// Children of the process that runs --nproc.
std::vector<pid_t> children_of(pid_t parent) {
  // Not read_file: files below /proc have no size.
  const std::string id = std::to_string(parent);
  std::ifstream list("/proc/" + id + "/task/" + id + "/children");
  std::vector<pid_t> out;
  for (pid_t child; list >> child;) out.push_back(child);
  return out;
}

void wait_for_steps(Child& child, const std::string& run) {
  while (child.running()) {
    const auto text = read_file(run + "/metrics.jsonl");
    if (text.ok() && std::count(text->begin(), text->end(), '\n') >= 2) return;
    usleep(20000);
  }
}

TEST_F(Train, WhatOneRankCannotWriteEndsAllWith74) {
  const Words sets = {"train.steps=2", "data.val=", "pipeline.timeout=10"};
  const struct {
    const char* set;
    const char* path;
  } cases[] = {{"debug.memory=1", "memory.jsonl"},
               {"debug.trace=true", "trace/rank1.json"}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.path);
    ASSERT_TRUE(remove_path(run("full")).ok());
    ASSERT_EQ(train("full", 2, sets).code, 0);
    // A folder that no file replaces.
    folder_.write(std::string("runs/full/") + c.path + "/x", "");
    const auto job = start_job(
        words("full", 0, sets + Words{"train.steps=4", c.set}, {"--resume"}),
        {{}, {}});
    for (const auto& child : job) {
      const ChildResult r = child->wait();
      EXPECT_EQ(r.code, 74) << r.err;
      EXPECT_NE(r.err.find(c.path), std::string::npos) << r.err;
    }
  }
}

TEST_F(Train, ARankThatIsNotThereIsNamedWithinTheTimeout) {
  const Seconds since;
  const auto job = start_job(words("alone", 0, {"pipeline.connect_timeout=3"}),
                             {{}, {"--help"}});
  ASSERT_TRUE(ends_within(*job[0], 3 + 10));
  const ChildResult r = job[0]->wait();
  EXPECT_EQ(r.code, 72) << r.err;
  EXPECT_NE(r.err.find("rank 1 was not there"), std::string::npos) << r.err;
}

// The program itself, without a launcher.
TEST_F(Train, SurvivorsSayWhomTheyMissWithinTheTimeout) {
  constexpr double kTimeout = 4;
  for (const int signal : {SIGKILL, SIGSTOP}) {
    SCOPED_TRACE(signal);
    const auto job = start_job(
        words("fault", 0,
              {"train.steps=100000", "data.val=", "pipeline.timeout=4"}),
        {{}, {}, {}});
    wait_for_steps(*job[0], run("fault"));
    job[1]->send(signal);
    for (const int r : {0, 2}) {
      SCOPED_TRACE(r);
      ASSERT_TRUE(ends_within(*job[r], kTimeout + 10));
    }
    bool named = false;
    for (const int r : {0, 2}) {
      const ChildResult result = job[r]->wait();
      EXPECT_EQ(result.code, 72) << result.err;
      // Itself, what it did, and whom it did it with, who may miss the other.
      EXPECT_NE(result.err.find("rank " + std::to_string(r) + ": "),
                std::string::npos)
          << result.err;
      EXPECT_TRUE(result.err.find("action ") != std::string::npos ||
                  result.err.find("collective '") != std::string::npos)
          << result.err;
      EXPECT_TRUE(result.err.find("from rank ") != std::string::npos ||
                  result.err.find("to rank ") != std::string::npos)
          << result.err;
      named |= result.err.find(" rank 1") != std::string::npos;
    }
    EXPECT_TRUE(named);
    ASSERT_TRUE(remove_path(run("fault")).ok());
  }
}

TEST_F(Train, ARankThatIsKilledEndsAll) {
  Child child(words(
      "fault", 3, {"train.steps=100000", "data.val=", "pipeline.timeout=20"}));
  wait_for_steps(child, run("fault"));
  const std::vector<pid_t> ranks = children_of(child.pid());
  ASSERT_EQ(ranks.size(), 3u);
  kill(ranks[1], SIGKILL);
  ASSERT_TRUE(ends_within(child, 20 + 10));
  const ChildResult r = child.wait();
  EXPECT_EQ(r.code, 128 + SIGKILL);
  EXPECT_NE(r.err.find("rank 1 was ended by signal 9"), std::string::npos);
  // The others found out by themselves and say whom they miss.
  for (const char* survivor : {"0 | tapeline: ", "2 | tapeline: "}) {
    EXPECT_NE(r.err.find(survivor), std::string::npos) << r.err;
  }
  EXPECT_NE(r.err.find("rank 1"), std::string::npos) << r.err;
  for (const pid_t rank : ranks) EXPECT_NE(kill(rank, 0), 0);
}

TEST_F(Train, ARankThatStallsIsNamedWithinTheTimeout) {
  Child child(words("fault", 2,
                    {"train.steps=100000", "data.val=", "pipeline.timeout=3"}));
  wait_for_steps(child, run("fault"));
  const std::vector<pid_t> ranks = children_of(child.pid());
  ASSERT_EQ(ranks.size(), 2u);
  kill(ranks[1], SIGSTOP);
  ASSERT_TRUE(ends_within(child, 3 + 10));
  const ChildResult r = child.wait();
  EXPECT_EQ(r.code, 72) << r.err;
  EXPECT_NE(r.err.find("rank 1"), std::string::npos) << r.err;
}

}  // namespace
}  // namespace tapeline
