// What a run leaves, and what the other verbs make of it.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/file.h"
#include "runtime/json.h"
#include "runtime/safetensors.h"
#include "tests/cli/child.h"
#include "tests/cli/expect.h"

namespace tapeline {
namespace {

// --- A trained run and its files

// Trained once for all tests that only look.
class Trained : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TempFolder;
    config_ = new std::string(small_config(*folder_));
    result_ = new ChildResult(tapeline_run({"train", "--config", *config_}));
  }
  static void TearDownTestSuite() {
    delete result_;
    delete config_;
    delete folder_;
  }
  static std::string run(const std::string& name) {
    return *folder_ / ("runs/small/" + name);
  }

  static TempFolder* folder_;
  static std::string* config_;
  static ChildResult* result_;
};
TempFolder* Trained::folder_;
std::string* Trained::config_;
ChildResult* Trained::result_;

TEST_F(Trained, EndsWith0AndLeavesTheDocumentedFiles) {
  EXPECT_EQ(result_->code, 0) << result_->err;
  EXPECT_EQ(result_->err, "");
  EXPECT_EQ(list_directory(run("")).value(),
            (Words{"config.resolved.toml", "hf", "log.txt", "metrics.jsonl",
                   "provenance.json", "run.lock", "samples", "snapshots"}));
  EXPECT_EQ(list_directory(run("snapshots")).value(),
            (Words{"LATEST", "step_0000004", "step_0000006"}));
  EXPECT_EQ(list_directory(run("samples")).value(), Words{"step_0000006.txt"});
  EXPECT_EQ(list_directory(run("hf")).value(),
            (Words{"config.json", "model.safetensors"}));
  EXPECT_EQ(read_file(run("log.txt")).value(), result_->out);
}

TEST_F(Trained, MetricsHaveTheDocumentedKeysInOrder) {
  const Words step_keys = {"step",
                           "time_unix",
                           "loss",
                           "lm_loss",
                           "mtp_loss",
                           "balance_loss",
                           "z_loss",
                           "indexer_loss",
                           "lr",
                           "grad_norm",
                           "tokens",
                           "tokens_per_s",
                           "step_ms",
                           "pool_peak_bytes",
                           "pinned_bytes",
                           "offload_bytes",
                           "offload_exposed_ms",
                           "replays",
                           "rss_peak_bytes",
                           "bubble_measured",
                           "bubble_simulated",
                           "skipped",
                           "grad_hash",
                           "param_hash"};
  int steps = 0, evaluations = 0;
  double previous = INFINITY;
  for (const Json& row : lines_of(run("metrics.jsonl"))) {
    if (row.find("val_loss") != nullptr) {
      EXPECT_EQ(keys(row),
                (Words{"step", "val_loss", "val_bits_per_byte", "val_bytes"}));
      EXPECT_EQ(row.find("val_bytes")->integer(),
                static_cast<int64_t>(sample_text(200).size()));
      EXPECT_NEAR(row.find("val_bits_per_byte")->number(),
                  row.find("val_loss")->number() / std::log(2), 1e-12);
      EXPECT_LT(row.find("val_loss")->number(), previous);
      previous = row.find("val_loss")->number();
      ++evaluations;
      continue;
    }
    EXPECT_EQ(keys(row), step_keys);
    EXPECT_EQ(row.find("step")->integer(), ++steps);
    EXPECT_EQ(row.find("tokens")->integer(), 128 * steps);
    EXPECT_EQ(row.find("param_hash")->string().size(), 32u);
    double parts = 0;
    for (const char* part :
         {"lm_loss", "mtp_loss", "balance_loss", "z_loss", "indexer_loss"}) {
      EXPECT_GT(row.find(part)->number(), 0) << part;
      parts += row.find(part)->number();
    }
    EXPECT_NEAR(row.find("loss")->number(), parts, 1e-12);
    EXPECT_EQ(row.find("replays")->integer(), 0);
    EXPECT_TRUE(row.find("bubble_measured")->is_null());
  }
  EXPECT_EQ(steps, 6);
  EXPECT_EQ(evaluations, 2);
}

TEST_F(Trained, ExportHasEveryTensorAndEveryKey) {
  const Json config = read_json(run("hf/config.json")).value();
  EXPECT_EQ(config.find("model_type")->string(), "glm_moe_dsa");
  EXPECT_EQ(config.find("index_topk")->integer(), 16);
  EXPECT_EQ(config.find("dtype")->string(), "float32");
  const SafetensorsReader reader = SafetensorsReader::open(run("hf")).value();
  for (const char* name : {"model.embed_tokens.weight", "lm_head.weight",
                           "model.layers.2.mlp.gate.e_score_correction_bias",
                           "model.layers.3.eh_proj.weight",
                           "model.layers.3.self_attn.indexer.wq_b.weight",
                           "model.layers.1.mlp.experts.3.down_proj.weight"}) {
    EXPECT_NE(reader.find(name), nullptr) << name;
  }
  EXPECT_EQ(reader.find("model.layers.2.self_attn.indexer.wk.weight"), nullptr);
  EXPECT_EQ(reader.metadata().at("format"), "pt");
}

TEST_F(Trained, EvalAgreesWithTheLastEvaluationOfTheRun) {
  const ChildResult r = tapeline_run({"eval", "--model", run("hf"), "--data",
                                      *folder_ / "text.txt", "--json"});
  EXPECT_EQ(r.code, 0) << r.err;
  const Json json = json_of(r.out);
  EXPECT_EQ(keys(json),
            (Words{"schema", "loss", "bits_per_byte", "bytes", "tokens"}));
  EXPECT_EQ(json.find("schema")->integer(), 1);
  const Json last = lines_of(run("metrics.jsonl")).back();
  EXPECT_EQ(json.find("bits_per_byte")->number(),
            last.find("val_bits_per_byte")->number());
  EXPECT_EQ(json.find("bytes")->integer(), last.find("val_bytes")->integer());
}

TEST_F(Trained, GenerationIsTheSameWithAndWithoutTheCache) {
  for (const char* temperature : {"0", "0.9"}) {
    const Words words = {
        "generate",      "--model",      run("hf"), "--prompt",
        "the king went", "--max_tokens", "40",      "--temperature",
        temperature,     "--seed",       "5",       "--json"};
    const ChildResult cached = tapeline_run(words);
    const ChildResult plain = tapeline_run(words + Words{"--no_cache"});
    EXPECT_EQ(cached.code, 0) << cached.err;
    EXPECT_EQ(cached.out, plain.out);
    const Json json = json_of(cached.out);
    EXPECT_EQ(keys(json), (Words{"schema", "prompt_ids", "ids", "text"}));
    EXPECT_EQ(json.find("prompt_ids")->array().size(), 13u);
    EXPECT_EQ(json.find("ids")->array().size(), 40u);
  }
}

TEST_F(Trained, SeedsChooseTheSample) {
  const auto text = [&](const std::string& seed) {
    return tapeline_run({"generate", "--model", run("hf"), "--prompt", "a",
                         "--temperature=1", "--seed=" + seed})
        .out;
  };
  EXPECT_EQ(text("1"), text("1"));
  EXPECT_NE(text("1"), text("2"));
}

TEST_F(Trained, RelativePathsAreThoseOfTheUserUnderBazelRun) {
  const ChildResult r = tapeline_run(
      {"eval", "--model", "runs/small/hf", "--data", "text.txt"},
      {.environment = {{"BUILD_WORKING_DIRECTORY", folder_->path()}},
       .folder = {},
       .before_exec = {}});
  EXPECT_EQ(r.code, 0) << r.err;
}

TEST_F(Trained, FineTunesFromAFolder) {
  const ChildResult r = tapeline_run(
      {"train", "--config", *config_, "--set", "run.name=tuned", "--set",
       "train.steps=1", "--set", "model.path=\"" + run("hf") + "\""});
  EXPECT_EQ(r.code, 0) << r.err;
  const double first = lines_of(*folder_ / "runs/tuned/metrics.jsonl")[0]
                           .find("lm_loss")
                           ->number();
  EXPECT_LT(first, 4.5);  // not ln 256 = 5.5
}

TEST_F(Trained, ANewRunMovesTheEarlierOneAside) {
  const TempFolder folder;
  const Words words = {"train",         "--config",      small_config(folder),
                       "--set",         "train.steps=1", "--set",
                       "run.name=twice"};
  ASSERT_EQ(tapeline_run(words).code, 0);
  const auto before = files_below(folder / "runs/twice");
  const ChildResult again = tapeline_run(words);
  EXPECT_EQ(again.code, 0);
  EXPECT_NE(again.out.find("twice.1"), std::string::npos);
  std::map<std::string, std::string> moved;
  for (const auto& [path, bytes] : files_below(folder / "runs/twice.1")) {
    moved[folder / "runs/twice" +
          path.substr((folder / "runs/twice.1").size())] = bytes;
  }
  EXPECT_EQ(moved, before);
}

TEST_F(Trained, AFullStdoutEndsWith74) {
  for (const Words& words : std::vector<Words>{
           {"generate", "--model", run("hf"), "--prompt", "a"},
           {"eval", "--model", run("hf"), "--data", *folder_ / "text.txt"},
           {"train", "--config", *config_, "--print_config"},
           {"--help"}}) {
    const ChildResult r = tapeline_run(
        words, {.environment = {}, .folder = {}, .before_exec = [] {
                  dup2(::open("/dev/full", O_WRONLY), STDOUT_FILENO);
                }});
    expect_failure(r, 74, {"stdout"});
  }
}

TEST(Train, AFolderThatIsNoRunStaysAsItIs) {
  const TempFolder folder;
  const std::string config = small_config(folder);
  folder.write("runs/small/thesis.txt", "years of work");
  const auto before = files_below(folder.path());
  expect_failure(tapeline_run({"train", "--config", config}), 2,
                 {"runs/small is no run", "move it away"});
  EXPECT_EQ(files_below(folder.path()), before);
}

// Threads whose stacks cannot be had: the library throws.
// Stacks that do not fit: the address space ends after some of the threads.
// The address sanitizer needs that space for itself; there no stack fits.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kAddressSanitizer = true;
constexpr int kStackBits = 46;
#else
constexpr bool kAddressSanitizer = false;
constexpr int kStackBits = 30;
#endif

TEST(Train, ThreadsThatCannotStartAreOneLine) {
  const TempFolder folder;
  const ChildResult r =
      tapeline_run({"train", "--config", small_config(folder), "--threads=16"},
                   {.environment = {{"OPENBLAS_NUM_THREADS", "1"}},
                    .folder = {},
                    .before_exec = [] {
                      rlimit stack = {};
                      getrlimit(RLIMIT_STACK, &stack);
                      stack.rlim_cur = rlim_t{1} << kStackBits;
                      const rlimit space = {rlim_t{1} << 32, rlim_t{1} << 32};
                      if (setrlimit(RLIMIT_STACK, &stack) != 0) _exit(99);
                      if (!kAddressSanitizer) setrlimit(RLIMIT_AS, &space);
                    }});
  if (r.code == 99) GTEST_SKIP() << "the stack's limit is fixed";
  expect_failure(r, 70, {"the system refused a resource"});
}

TEST(Train, SequencesShorterThanTheSelectionWork) {
  const TempFolder folder;
  const ChildResult r =
      tapeline_run({"train", "--config", small_config(folder), "--set",
                    "train.seq_len=12", "--set", "train.steps=2"});
  EXPECT_EQ(r.code, 0) << r.err;
}

std::vector<std::string> hashes(const std::string& metrics) {
  std::vector<std::string> out;
  std::istringstream lines(read_file(metrics).value());
  for (std::string line; std::getline(lines, line);) {
    const Json row = parse_json(line, metrics).value();
    for (const char* key : {"grad_hash", "param_hash"}) {
      if (const Json* hash = row.find(key)) out.push_back(hash->string());
    }
  }
  return out;
}

// Ways to need less memory, and what of each step's metrics shows that they
// were taken.
TEST(Train, SavingMemoryGivesTheSameHashesAtEveryStep) {
  const TempFolder folder;
  const std::string config = small_config(folder);
  const std::string none = "\"replays\": 0,", stay = "\"offload_bytes\": 0,";
  const struct {
    std::string name;
    std::vector<std::string> sets;
    bool replays, moves;
  } cases[] = {
      {"plain", {}, false, false},
      {"full", {"recompute.policy=full"}, true, false},
      {"every", {"recompute.policy=every_n", "recompute.every=2"}, true, false},
      {"keep",
       {"recompute.policy=keep",
        "recompute.keep=[\"sparse_attention\", \"linear\"]"},
       true,
       false},
      {"norms", {"recompute.drop_norms=true"}, false, false},
      {"activations", {"offload.activations=true"}, false, true},
      {"ids", {"recompute.policy=full", "offload.ids=true"}, true, true},
      {"both",
       {"recompute.policy=ratio", "recompute.ratio=0.5",
        "offload.activations=true", "offload.ids=true"},
       true,
       true},
  };
  std::vector<std::string> want;
  for (const auto& c : cases) {
    SCOPED_TRACE(c.name);
    std::vector<std::string> words = {
        "train",
        "--config",
        config,
        "--set",
        "run.name=" + c.name,
        "--set",
        "debug.hash_every=1",
        "--set",
        "train.steps=3",
        "--set",
        "offload.strict=true",
        "--set",
        "model.num_hidden_layers=5",
        "--set",
        "model.indexer_types=[\"full\", \"shared\", \"full\", "
        "\"shared\", \"full\"]",
        "--set",
        "model.mlp_layer_types=[\"dense\", \"sparse\", \"sparse\", "
        "\"dense\", \"sparse\"]"};
    for (const std::string& set : c.sets) {
      words.insert(words.end(), {"--set", set});
    }
    const ChildResult r = tapeline_run(words);
    ASSERT_EQ(r.code, 0) << r.err;
    const std::string metrics = folder / ("runs/" + c.name + "/metrics.jsonl");
    const std::vector<std::string> got = hashes(metrics);
    ASSERT_EQ(got.size(), 6u);
    if (want.empty()) want = got;
    EXPECT_EQ(got, want);
    const std::string text = read_file(metrics).value();
    EXPECT_EQ(text.find(none) == std::string::npos, c.replays);
    EXPECT_EQ(text.find(stay) == std::string::npos, c.moves);
  }
}

TEST(Train, AFullPinnedPoolIsCountedOrEndsTheRun) {
  const TempFolder folder;
  const std::string config = small_config(folder);
  const std::vector<std::string> words = {
      "train",
      "--config",
      config,
      "--set",
      "train.steps=2",
      "--set",
      "train.seq_len=4096",
      "--set",
      "train.micro_batches=1",
      "--set",
      "offload.activations=true",
      "--set",
      "offload.pinned_cap_mib=1",
      "--set",
      "model.num_hidden_layers=5",
      "--set",
      "model.indexer_types=[\"full\", \"shared\", \"full\", \"shared\", "
      "\"full\"]",
      "--set",
      "model.mlp_layer_types=[\"dense\", \"sparse\", \"sparse\", \"dense\", "
      "\"sparse\"]"};
  std::vector<std::string> loose = words, strict = words;
  loose.insert(loose.end(), {"--set", "run.name=loose"});
  strict.insert(strict.end(),
                {"--set", "run.name=strict", "--set", "offload.strict=true"});
  const ChildResult went = tapeline_run(loose);
  EXPECT_EQ(went.code, 0) << went.err;
  EXPECT_NE(went.out.find("stay on the device"), std::string::npos) << went.out;
  const ChildResult ended = tapeline_run(strict);
  EXPECT_EQ(ended.code, 70);
  EXPECT_NE(ended.err.find("raise offload.pinned_cap_mib"), std::string::npos)
      << ended.err;
}

TEST(Train, WritesWhatMemoryItsFirstStepsTook) {
  const TempFolder folder;
  const ChildResult r = tapeline_run(
      {"train", "--config", small_config(folder), "--set", "train.steps=2",
       "--set", "debug.memory=1", "--set", "recompute.policy=full", "--set",
       "offload.activations=true", "--set", "run.name=logged"});
  ASSERT_EQ(r.code, 0) << r.err;
  const std::string lines =
      read_file(folder / "runs/logged/memory.jsonl").value();
  for (const char* word : {"\"allocate\"", "\"free\"", "\"evict\"", "\"load\"",
                           "\"replay\"", "\"pass\": \"forward\"",
                           "\"pass\": \"backward\"", "layers.1.self_attn"}) {
    EXPECT_NE(lines.find(word), std::string::npos) << word;
  }
  const std::string trace =
      read_file(folder / "runs/logged/trace/memory.json").value();
  EXPECT_NE(trace.find("\"ph\": \"C\""), std::string::npos);
  EXPECT_TRUE(parse_json(trace, "trace", 64).ok());
}

TEST(Plan, PrintsWhatARunDoes) {
  const TempFolder folder;
  const std::string config = small_config(folder);
  const std::vector<std::string> sets = {"--config", config,
                                         "--set",    "recompute.policy=full",
                                         "--set",    "offload.activations=true",
                                         "--set",    "offload.ids=true"};
  std::vector<std::string> plan = {"plan", "--json"}, train = {"train"};
  plan.insert(plan.end(), sets.begin(), sets.end());
  train.insert(train.end(), sets.begin(), sets.end());
  train.insert(train.end(), {"--set", "train.steps=2", "--set",
                             "run.name=planned", "--set", "train.threads=1"});
  const ChildResult planned = tapeline_run(plan);
  ASSERT_EQ(planned.code, 0) << planned.err;
  const ChildResult ran = tapeline_run(train);
  ASSERT_EQ(ran.code, 0) << ran.err;
  const Json json = parse_json(planned.out, "plan", 64).value();
  const std::string metrics =
      read_file(folder / "runs/planned/metrics.jsonl").value();
  const size_t second = metrics.find("\"step\": 2,");
  ASSERT_NE(second, std::string::npos);
  const auto expect_in_metrics = [&](const char* metric, const char* key) {
    const std::string text =
        std::string("\"") + metric + "\": " + json.find(key)->dump() + ",";
    EXPECT_NE(metrics.find(text, second), std::string::npos) << text;
  };
  expect_in_metrics("pool_peak_bytes", "peak_bytes");
  expect_in_metrics("offload_bytes", "offload_bytes");
  expect_in_metrics("pinned_bytes", "pinned_bytes");
  expect_in_metrics("replays", "replays");
  EXPECT_GT(json.find("offload_bytes")->integer(), 0);
  // That of a GPU needs none, and is the same where kernels ask for the same.
  std::vector<std::string> other = plan;
  other.insert(other.end(), {"--set", "device=cuda"});
  const ChildResult gpu = tapeline_run(other);
  EXPECT_EQ(gpu.code, 0) << gpu.err;
  EXPECT_NE(gpu.out.find("\"peak_bytes\""), std::string::npos);
  plan[1] = "--set=train.seq_len=64";
  const ChildResult text = tapeline_run(plan);
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_NE(text.out.find("peak of the pool"), std::string::npos);
}

TEST(Bench, MeasuresAForwardAndBackwardPass) {
  const TempFolder folder;
  const Words bench = {"bench",   "--config",   small_config(folder),
                       "--batch", "2",          "--seq",
                       "32",      "--fwd_bwd",  "--warmup",
                       "1",       "--repeats=3"};
  // Somewhere without a git checkout.
  const ChildResult r = tapeline_run(
      bench + Words{"--json"}, {.environment = {{"TAPELINE_COMMIT", "0123abc"}},
                                .folder = folder.path()});
  ASSERT_EQ(r.code, 0) << r.err;
  const Json json = json_of(r.out);
  EXPECT_EQ(keys(json)[0], "schema");
  const Json& made_by = *json.find("provenance");
  EXPECT_EQ(made_by.find("commit")->string(), "0123abc");
  EXPECT_EQ(made_by.find("command_line")->array()[1].string(), "bench");
  const auto number = [&](const char* key) { return json.find(key)->number(); };
  std::vector<double> all;
  for (const Json& ms : json.find("ms_all")->array()) {
    all.push_back(ms.number());
    EXPECT_GT(all.back(), 0);
  }
  ASSERT_EQ(all.size(), 3u);
  std::sort(all.begin(), all.end());
  EXPECT_EQ(number("ms"), all[1]);
  EXPECT_NEAR(number("tokens_per_s"), 64e3 / all[1], 1e-3);
  // What a plan says of weights and gradients; no moments, no masters.
  const ChildResult planned = tapeline_run(
      {"plan", "--config", bench[2], "--json", "--set=train.seq_len=64"});
  const Json plan = json_of(planned.out);
  const double gib = 1 << 30;
  EXPECT_EQ(number("parameter_gib") * gib,
            plan.find("parameter_bytes")->number());
  EXPECT_EQ(number("gradient_gib") * gib,
            plan.find("gradient_bytes")->number());
  EXPECT_LE(number("peak_gib") * gib,
            plan.find("peak_bytes")->number() -
                plan.find("optimizer_bytes")->number());
  EXPECT_GT(number("peak_gib"),
            number("parameter_gib") + number("gradient_gib"));
  EXPECT_NEAR(number("loss"), std::log(256), 0.2);  // it knows nothing
  // The same loss wherever it is made, and how.
  const ChildResult other = tapeline_run(
      bench + Words{"--json", "--threads=2", "--set=recompute.policy=full",
                    "--set=offload.activations=true", "--alternate"});
  ASSERT_EQ(other.code, 0) << other.err;
  EXPECT_EQ(json_of(other.out).find("loss")->number(), number("loss"));
  EXPECT_EQ(json_of(other.out).find("ms_without_all")->array().size(), 3u);

  const ChildResult text = tapeline_run(bench);
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_NE(text.out.find("tokens/s"), std::string::npos);
  expect_failure(tapeline_run(bench + Words{"--alternate"}), 64,
                 {"--alternate compares with offload"});
  // On a CPU there is no CUDA to be watched.
  expect_failure(tapeline_run(bench + Words{"--trace", folder / "t.json"}), 2,
                 {"CUDA"});
}

TEST(Train, InBf16FollowsF32) {
  const TempFolder folder;
  const std::string config = small_config(folder);
  const auto losses = [&](const std::string& dtype) {
    const ChildResult r =
        tapeline_run({"train", "--config", config, "--set=run.name=" + dtype,
                      "--set=compute_dtype=" + dtype, "--set=train.steps=12"});
    EXPECT_EQ(r.code, 0) << r.err;
    std::vector<double> out;
    for (const Json& row :
         lines_of(folder / "runs" + ("/" + dtype + "/metrics.jsonl"))) {
      if (const Json* loss = row.find("lm_loss")) out.push_back(loss->number());
    }
    return out;
  };
  const std::vector<double> f32 = losses("f32"), bf16 = losses("bf16");
  ASSERT_EQ(f32.size(), 12u);
  ASSERT_EQ(bf16.size(), 12u);
  EXPECT_NE(bf16, f32);
  EXPECT_LT(f32.back(), f32.front() - 0.3);
  for (size_t i = 0; i < f32.size(); ++i) EXPECT_NEAR(bf16[i], f32[i], 0.1);
  // What was written is read again.
  const ChildResult e =
      tapeline_run({"eval", "--model", folder / "runs/bf16/hf", "--data",
                    folder / "text.txt", "--json"});
  EXPECT_EQ(e.code, 0) << e.err;
}

TEST(Train, SavesNothingWhereItIsToldTo) {
  const TempFolder folder;
  const ChildResult r = tapeline_run(
      {"train", "--config", small_config(folder), "--set=train.save=false"});
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_EQ(lines_of(folder / "runs/small/metrics.jsonl").size(), 6u + 2u);
  for (const auto& [path, text] : files_below(folder / "runs/small")) {
    EXPECT_EQ(path.find("snapshots/step"), std::string::npos) << path;
    EXPECT_EQ(path.find("hf/"), std::string::npos) << path;
  }
}

TEST(Train, OtherFamiliesTrainAndGenerate) {
  const TempFolder folder;
  std::string config = read_file(small_config(folder)).value();
  config.resize(config.find("[loss]"));
  for (const char* keys :
       {"model_type = \"qwen3\"", "model_type = \"llama\"",
        "model_type = \"qwen3_moe\"\nnum_experts = 4\n"
        "num_experts_per_tok = 2\nmoe_intermediate_size = 16"}) {
    SCOPED_TRACE(keys);
    const std::string path = folder.write(
        "family.toml",
        config +
            "[model]\nvocab_size = 256\nmax_position_embeddings = 64\n"
            "hidden_size = 32\nnum_hidden_layers = 2\nhead_dim = 16\n"
            "num_attention_heads = 2\nnum_key_value_heads = 1\n"
            "intermediate_size = 48\n" +
            keys + "\n");
    const ChildResult r =
        tapeline_run({"train", "--config", path, "--set", "train.steps=3"});
    EXPECT_EQ(r.code, 0) << r.err;
    const ChildResult g =
        tapeline_run({"generate", "--model", folder / "runs/small/hf",
                      "--prompt", "and ", "--max_tokens", "4", "--json"});
    EXPECT_EQ(g.code, 0) << g.err;
    EXPECT_EQ(json_of(g.out).find("ids")->array().size(), 4u);
  }
}

TEST(Train, RecomputationWithoutEffectIsAnError) {
  const TempFolder folder;
  const struct {
    Words sets, said;
  } cases[] = {
      {{"recompute.policy=every_n", "recompute.every=99"},
       {"recomputes none of 4 layers", "lower recompute.every = 99"}},
      {{"recompute.policy=ratio", "recompute.ratio=0.2"},
       {"recomputes none of 4 layers", "raise recompute.ratio = 0.2"}},
      {{"recompute.policy=full", "recompute.drop_norms=true"},
       {"recompute.drop_norms has no effect", "full"}},
      {{"recompute.keep=[\"linear\"]"}, {"recompute.keep has no effect"}},
      {{"recompute.policy=keep"}, {"recompute.keep names no operation"}},
  };
  for (const auto& c : cases) {
    for (const char* verb : {"train", "plan"}) {
      SCOPED_TRACE(verb + c.sets.back());
      Words words = {verb, "--config", small_config(folder)};
      for (const std::string& set : c.sets) words.push_back("--set=" + set);
      expect_failure(tapeline_run(words), 2, c.said);
    }
  }
}

TEST(Train, OutOfMemoryEndsWith70AndSaysWhatItWasFor) {
  const TempFolder folder;
  const ChildResult r =
      tapeline_run({"train", "--config", small_config(folder), "--set",
                    "model.intermediate_size=4000000"},
                   {.environment = {{"ASAN_OPTIONS",
                                     "max_allocation_size_mb=512:"
                                     "allocator_may_return_null=1:log_path=" +
                                         folder / "asan"}},
                    .folder = {},
                    .before_exec = [] {
                      const rlimit limit = {rlim_t{1} << 30, rlim_t{1} << 30};
                      if (!kAddressSanitizer) setrlimit(RLIMIT_AS, &limit);
                    }});
  expect_failure(r, 70, {"out of memory"});
}

TEST(Train, ProfileAndTraceAreWritten) {
  const TempFolder folder;
  const ChildResult r = tapeline_run(
      {"train", "--config", small_config(folder), "--set", "train.steps=1",
       "--set", "debug.profile=true", "--set", "debug.trace=true"});
  EXPECT_EQ(r.code, 0) << r.err;
  for (const char* range : {"step", "forward", "backward", "optimizer"}) {
    EXPECT_NE(r.out.find(range), std::string::npos) << range;
  }
  const Json trace = read_json(folder / "runs/small/trace/rank0.json").value();
  EXPECT_GT(trace.find("traceEvents")->array().size(), 4u);
}

// --- Not finite

TEST(NotFinite, BeyondTheBudgetTheCodeIs71) {
  const TempFolder folder;
  // A learning rate at which the first update already overflows.
  const Words words = {"train",
                       "--config",
                       small_config(folder),
                       "--set",
                       "optimizer.name=adamw",
                       "--set",
                       "optimizer.lr=1e38",
                       "--set",
                       "train.max_skipped=2",
                       "--set",
                       "train.snapshot_every=0"};
  expect_failure(
      tapeline_run(words), 71,
      {"step 4", "3 steps were not finite", "train.max_skipped = 2"});
  const std::vector<Json> rows = lines_of(folder / "runs/small/metrics.jsonl");
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(rows[3].find("skipped")->integer(), 3);
  EXPECT_TRUE(rows[3].find("loss")->is_null());
  EXPECT_EQ(rows[3].find("param_hash")->string(),
            rows[0].find("param_hash")->string());
}

TEST(NotFinite, AtTheEndTheCodeIs71AndNothingIsSavedOrExported) {
  // The only step makes weights at which the loss, or they themselves, are not
  // finite.
  for (const Words& more : std::vector<Words>{
           {"--set", "optimizer.lr=1e38"},
           {"--set", "optimizer.lr=1e60", "--set", "data.val=\"\""}}) {
    const TempFolder folder;
    expect_failure(
        tapeline_run(Words{"train", "--config", small_config(folder), "--set",
                           "optimizer.name=adamw", "--set", "train.steps=1"} +
                     more),
        71, {"finite"});
    EXPECT_FALSE(path_exists(folder / "runs/small/hf"));
    EXPECT_EQ(list_directory(folder / "runs/small/snapshots").value(), Words{});
  }
}

TEST(NotFinite, AnomalyModeNamesOperationLayerAndPhase) {
  const TempFolder folder;
  const Words words = {"train",
                       "--config",
                       small_config(folder),
                       "--set",
                       "optimizer.name=adamw",
                       "--set",
                       "optimizer.lr=1e38",
                       "--set",
                       "debug.anomaly=true"};
  expect_failure(tapeline_run(words), 71, {"step 2: ", "forward of ", " at "});
}

}  // namespace
}  // namespace tapeline
