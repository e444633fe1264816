// What the tapeline binary answers to its user: every wrong input ends with its
// documented code and one line that says what is wrong, where, and what to do;
// nothing that was on disk is lost.
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/file.h"
#include "runtime/json.h"
#include "runtime/safetensors.h"
#include "tests/cli/child.h"

namespace tapeline {
namespace {

using Words = std::vector<std::string>;

// One line on stderr, "tapeline: ...", with each of the parts.
void expect_failure(const ChildResult& r, int code, const Words& parts) {
  EXPECT_EQ(r.code, code) << r.err << " signal " << r.signal;
  EXPECT_TRUE(r.err.starts_with("tapeline: ")) << r.err;
  EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
  for (const std::string& part : parts) {
    EXPECT_NE(r.err.find(part), std::string::npos)
        << "no '" << part << "' in: " << r.err;
  }
}

Words operator+(Words a, const Words& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Json json_of(const std::string& text) {
  absl::StatusOr<Json> json = parse_json(text, "stdout");
  EXPECT_TRUE(json.ok()) << json.status() << text;
  return json.ok() ? *json : Json();
}

std::vector<std::string> keys(const Json& json) {
  std::vector<std::string> out;
  for (const auto& [key, value] : json.object()) out.push_back(key);
  return out;
}

std::vector<Json> lines_of(const std::string& path) {
  std::vector<Json> out;
  std::string text = read_file(path).value();
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    out.push_back(json_of(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return out;
}

// --- Usage

struct UsageCase {
  const char* name;
  Words words;
  Words parts;
};
class Usage : public testing::TestWithParam<UsageCase> {};
INSTANTIATE_TEST_SUITE_P(
    , Usage,
    testing::Values(
        UsageCase{"NoVerb", {}, {"no verb", "--help"}},
        UsageCase{
            "UnknownVerb", {"trian"}, {"'trian'", "did you mean 'train'"}},
        UsageCase{"FarVerb", {"zzz"}, {"no verb 'zzz'"}},
        UsageCase{"Parity", {"parity"}, {"'parity' is not available"}},
        UsageCase{"Plan", {"plan"}, {"'plan' is not available"}},
        UsageCase{"Schedule", {"schedule"}, {"'schedule' is not available"}},
        UsageCase{"Bench", {"bench"}, {"'bench' is not available"}},
        UsageCase{"Ckpt", {"ckpt", "inspect"}, {"'ckpt' is not available"}},
        UsageCase{"UnknownFlag",
                  {"train", "--confg=a"},
                  {"--confg", "did you mean 'config'"}},
        UsageCase{"FlagWithoutValue",
                  {"train", "--config"},
                  {"--config needs a value"}},
        UsageCase{"StrayWord", {"train", "tiny"}, {"no argument 'tiny'"}},
        UsageCase{"NotANumber",
                  {"generate", "--max_tokens", "many"},
                  {"--max_tokens takes a whole number, not 'many'"}},
        UsageCase{"NotABoolean",
                  {"generate", "--json=maybe"},
                  {"--json takes true or false"}},
        UsageCase{"NoConfig", {"train"}, {"--config is missing"}},
        UsageCase{"NoModel", {"generate"}, {"--model is missing"}},
        UsageCase{
            "NoPrompt", {"generate", "--model", "m"}, {"--prompt is missing"}},
        UsageCase{"NoData", {"eval", "--model", "m"}, {"--data is missing"}},
        UsageCase{"NegativeTemperature",
                  {"generate", "--model", "m", "--prompt", "a", "--temperature",
                   "-1"},
                  {"--temperature must be"}},
        UsageCase{"TopPAboveOne",
                  {"generate", "--model", "m", "--prompt", "a", "--top_p=1.5"},
                  {"--top_p must be"}},
        UsageCase{"ZeroThreads",
                  {"train", "--config", "c", "--threads=0"},
                  {"--threads must be"}}),
    [](const auto& info) { return info.param.name; });

TEST_P(Usage, EndsWith64AndOneLine) {
  const ChildResult r = tapeline_run(GetParam().words);
  expect_failure(r, 64, GetParam().parts);
  EXPECT_EQ(r.out, "");
}

TEST(Help, ListsOnlyWhatWorks) {
  const ChildResult r = tapeline_run({"--help"});
  EXPECT_EQ(r.code, 0);
  for (const char* verb : {"train", "generate", "eval"}) {
    EXPECT_NE(r.out.find(verb), std::string::npos) << verb;
    const ChildResult of = tapeline_run({verb, "--help"});
    EXPECT_EQ(of.code, 0);
    EXPECT_TRUE(of.out.starts_with(std::string("usage: tapeline ") + verb));
  }
  for (const char* verb : {"parity", "plan", "bench", "ckpt"}) {
    EXPECT_EQ(r.out.find(verb), std::string::npos) << verb;
  }
}

// --- Bad config and data: exit 2 before the run's folder exists

struct InputCase {
  const char* name;
  // Prepares files, and returns what to add to the command.
  std::function<Words(const TempFolder&)> words;
  Words parts;
};

Words set(const std::string& value) { return {"--set", value}; }

const std::vector<InputCase>& input_cases() {
  static const auto& cases = *new std::vector<InputCase>{
      {"UnknownKey",
       [](const auto&) { return set("train.step=5"); },
       {"train.step", "did you mean", "train.steps"}},
      {"BadType",
       [](const auto&) { return set("train.steps=\"many\""); },
       {"train.steps", "--set"}},
      {"FractionForWhole",
       [](const auto&) { return set("train.steps=2.5"); },
       {"train.steps"}},
      {"NoEquals",
       [](const auto&) { return set("train.steps"); },
       {"train.steps"}},
      {"ZeroSteps",
       [](const auto&) { return set("train.steps=0"); },
       {"train.steps", "0"}},
      {"UnknownOptimizer",
       [](const auto&) { return set("optimizer.name=sgd"); },
       {"optimizer.name", "adamw"}},
      {"MoreChoicesThanExperts",
       [](const auto&) { return set("model.num_experts_per_tok=5"); },
       {"num_experts_per_tok is 5", "4"}},
      {"TypesAndLayersDiffer",
       [](const auto&) { return set("model.num_hidden_layers=4"); },
       {"num_hidden_layers is 4"}},
      {"DecayLongerThanTheRun",
       [](const auto&) {
         return set("schedule.name=wsd") + set("schedule.decay_steps=7");
       },
       {"7 steps, but the run has 6"}},
      {"MinRateAboveRate",
       [](const auto&) {
         return set("schedule.name=cosine") + set("schedule.min_lr=1");
       },
       {"min_lr is 1"}},
      {"DepthsWithoutLayer",
       [](const auto&) {
         return set("model.num_nextn_predict_layers=0") +
                set("loss.mtp_depths=1");
       },
       {"num_nextn_predict_layers is 0"}},
      {"NotAvailableYet",
       [](const auto&) { return set("device=cuda"); },
       {"device = cuda"}},
      {"NoBf16Yet",
       [](const auto&) { return set("compute_dtype=bf16"); },
       {"compute_dtype = bf16"}},
      {"UnknownModel",
       [](const auto&) { return set("model.model_type=gpt9"); },
       {"model_type is 'gpt9'"}},
      {"EmptyCorpus",
       [](const TempFolder& f) {
         return set("data.train=\"" + f.write("empty.txt", "") + "\"");
       },
       {"empty.txt", "empty"}},
      {"MissingCorpus",
       [](const TempFolder& f) {
         return set("data.train=\"" + f / "absent.txt" + "\"");
       },
       {"absent.txt", "No such file"}},
      {"CorpusShorterThanASequence",
       [](const TempFolder& f) {
         return set("data.train=\"" + f.write("short.txt", "a few") + "\"");
       },
       {"64"}},
      {"TokenOutsideTheVocabulary",
       [](const TempFolder& f) {
         return set("data.train=\"" +
                    f.write("latin.txt", sample_text(20) + "caf\xc3\xa9") +
                    "\"") +
                set("model.vocab_size=128");
       },
       {"latin.txt", "token 195", "vocabulary of 128"}},
      {"MissingModelFolder",
       [](const TempFolder& f) {
         return set("model.path=\"" + f / "absent" + "\"");
       },
       {"absent/config.json", "No such file"}},
  };
  return cases;
}

class BadInput : public testing::TestWithParam<InputCase> {};
INSTANTIATE_TEST_SUITE_P(, BadInput, testing::ValuesIn(input_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(BadInput, EndsWith2BeforeAnyWork) {
  const TempFolder folder;
  const std::string config = small_config(folder);
  const ChildResult r = tapeline_run(Words{"train", "--config", config} +
                                     GetParam().words(folder));
  expect_failure(r, 2, GetParam().parts);
  EXPECT_FALSE(path_exists(folder / "runs"));
}

TEST(Config, MissingFileAndSyntaxErrorNameThePlace) {
  const TempFolder folder;
  expect_failure(tapeline_run({"train", "--config", folder / "no.toml"}), 2,
                 {"no.toml"});
  const std::string bad = folder.write("bad.toml", "seed = 1\n[train\n");
  expect_failure(tapeline_run({"train", "--config", bad}), 2, {"bad.toml:2:"});
}

TEST(Config, PrintedConfigPrintsTheSameAgain) {
  const TempFolder folder;
  const std::string config = small_config(folder);
  const ChildResult first = tapeline_run({"train", "--config", config, "--set",
                                          "train.steps=9", "--print_config"});
  EXPECT_EQ(first.code, 0) << first.err;
  EXPECT_NE(first.out.find("steps = 9"), std::string::npos);
  EXPECT_FALSE(path_exists(folder / "runs"));
  const std::string printed = folder.write("printed.toml", first.out);
  const ChildResult second =
      tapeline_run({"train", "--config", printed, "--print_config"});
  // Origins differ; the settings do not.
  const auto without_origins = [](const std::string& text) {
    std::string out;
    for (size_t i = 0; i < text.size();) {
      const size_t end = std::min(text.find('\n', i), text.size());
      const std::string line = text.substr(i, end - i);
      out += line.substr(0, line.find("  #")) + "\n";
      i = end + 1;
    }
    return out;
  };
  EXPECT_EQ(without_origins(second.out), without_origins(first.out));
}

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

TEST(Train, SequencesShorterThanTheSelectionWork) {
  const TempFolder folder;
  const ChildResult r =
      tapeline_run({"train", "--config", small_config(folder), "--set",
                    "train.seq_len=12", "--set", "train.steps=2"});
  EXPECT_EQ(r.code, 0) << r.err;
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

TEST(Train, OutOfMemoryEndsWith70AndSaysWhatItWasFor) {
  const TempFolder folder;
  const ChildResult r =
      tapeline_run({"train", "--config", small_config(folder), "--set",
                    "model.intermediate_size=4000000"},
                   {.environment = {}, .folder = {}, .before_exec = [] {
                      const rlimit limit = {rlim_t{1} << 30, rlim_t{1} << 30};
                      setrlimit(RLIMIT_AS, &limit);
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
                       "train.max_skipped=2"};
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

// --- Model files

class ModelFile : public testing::Test {
 protected:
  void SetUp() override {
    config_ = small_config(folder_);
    const ChildResult r =
        tapeline_run({"train", "--config", config_, "--set", "train.steps=1"});
    ASSERT_EQ(r.code, 0) << r.err;
    hf_ = folder_ / "runs/small/hf";
    file_ = hf_ + "/model.safetensors";
  }
  // All three verbs that read a model refuse it alike, and leave it as it is.
  void expect_refused(const Words& parts) {
    const auto before = files_below(hf_);
    expect_failure(tapeline_run({"generate", "--model", hf_, "--prompt", "a"}),
                   2, parts);
    expect_failure(
        tapeline_run({"eval", "--model", hf_, "--data", folder_ / "text.txt"}),
        2, parts);
    expect_failure(
        tapeline_run({"train", "--config", config_, "--set", "run.name=tuned",
                      "--set", "model.path=\"" + hf_ + "\""}),
        2, parts);
    EXPECT_EQ(files_below(hf_), before);
    EXPECT_FALSE(path_exists(folder_ / "runs/tuned"));
  }
  void edit_config(const std::string& key, const Json& value) {
    Json json = read_json(hf_ + "/config.json").value();
    json[key] = value;
    ASSERT_TRUE(write_json(hf_ + "/config.json", json).ok());
    // train's own keys would win over the file's.
    std::string text = read_file(config_).value();
    text.resize(text.find("[model]"));
    ASSERT_TRUE(write_file_atomic(config_, text).ok());
  }
  void overwrite(size_t at, const std::string& bytes) {
    std::string text = read_file(file_).value();
    text.replace(at, bytes.size(), bytes);
    ASSERT_TRUE(write_file_atomic(file_, text).ok());
  }

  TempFolder folder_;
  std::string config_, hf_, file_;
};

TEST_F(ModelFile, Missing) {
  ASSERT_TRUE(remove_path(file_).ok());
  expect_refused({"model.safetensors", hf_});
}

TEST_F(ModelFile, Truncated) {
  const std::string text = read_file(file_).value();
  ASSERT_TRUE(write_file_atomic(file_, text.substr(0, text.size() - 7)).ok());
  expect_refused({"model.safetensors"});
}

TEST_F(ModelFile, WrongShape) {
  edit_config("intermediate_size", 40);
  expect_refused({"tensor model.layers.0.mlp.", "[48, 32]", "[40, 32]"});
}

TEST_F(ModelFile, MoreExpertsThanInTheFile) {
  edit_config("n_routed_experts", 6);
  expect_refused({"tensor model.layers.1.mlp."});
}

TEST_F(ModelFile, FewerExpertsThanInTheFile) {
  edit_config("n_routed_experts", 2);
  expect_refused(
      {"tensor model.layers.1.mlp.gate.weight", "[4, 32]", "[2, 32]"});
}

TEST_F(ModelFile, VocabularyLargerThanTheEmbedding) {
  edit_config("vocab_size", 300);
  expect_refused({"embed_tokens.weight", "[256, 32]", "[300, 32]"});
}

TEST_F(ModelFile, NanWeightIsNamedWithItsIndex) {
  const SafetensorsReader reader = SafetensorsReader::open(file_).value();
  const TensorInfo* info =
      reader.find("model.layers.1.self_attn.o_proj.weight");
  ASSERT_NE(info, nullptr);
  const float nan = NAN;
  std::string bytes(4, '\0');
  std::memcpy(bytes.data(), &nan, 4);
  overwrite(info->offset + 4 * 37, bytes);
  expect_refused(
      {"model.layers.1.self_attn.o_proj.weight", "element 37", "nan"});
}

TEST_F(ModelFile, PromptOutsideTheVocabularyIsRefused) {
  const TempFolder folder;
  const std::string config = small_config(folder);
  ASSERT_EQ(tapeline_run({"train", "--config", config, "--set", "train.steps=1",
                          "--set", "model.vocab_size=128"})
                .code,
            0);
  expect_failure(tapeline_run({"generate", "--model", folder / "runs/small/hf",
                               "--prompt", "caf\xc3\xa9"}),
                 2, {"token 195", "vocabulary of 128"});
}

// --- Snapshots

class Snapshots : public testing::Test {
 protected:
  void SetUp() override {
    config_ = small_config(folder_);
    ASSERT_EQ(tapeline_run({"train", "--config", config_}).code, 0);
    last_ = folder_ / "runs/small/snapshots/step_0000006";
    earlier_ = folder_ / "runs/small/snapshots/step_0000004";
  }
  ChildResult resume(const Words& more = {}) {
    return tapeline_run(Words{"train", "--config", config_} +
                        (more.empty() ? Words{"--resume"} : more));
  }
  void damage(const std::string& snapshot, const std::string& how) {
    const std::string file = snapshot + "/rank00000.safetensors";
    if (how == "missing manifest") {
      ASSERT_TRUE(remove_path(snapshot + "/MANIFEST.json").ok());
      return;
    }
    std::string bytes = read_file(file).value();
    if (how == "flipped bit") bytes[bytes.size() / 2] ^= 4;
    if (how == "cut") bytes.resize(bytes.size() - 1);
    ASSERT_TRUE(write_file_atomic(file, bytes).ok());
  }

  TempFolder folder_;
  std::string config_, last_, earlier_;
};

TEST_F(Snapshots, ADamagedOneIsNamedAndTheOlderUsed) {
  for (const char* how : {"flipped bit", "cut", "missing manifest"}) {
    SCOPED_TRACE(how);
    damage(last_, how);
    const ChildResult r = resume();
    EXPECT_EQ(r.code, 0) << r.err;
    EXPECT_NE(r.out.find("snapshot " + last_ + " is not usable"),
              std::string::npos)
        << r.out;
    EXPECT_NE(r.out.find("resumed from " + earlier_), std::string::npos);
  }
}

TEST_F(Snapshots, WithoutAUsableOneTheCodeIs75) {
  for (const char* how : {"flipped bit", "cut", "missing manifest"}) {
    SCOPED_TRACE(how);
    damage(last_, how);
    damage(earlier_, how);
    const auto before = files_below(folder_.path());
    expect_failure(resume(), 75, {"no usable snapshot", "step_0000006"});
    EXPECT_EQ(files_below(folder_.path()), before);
  }
}

TEST_F(Snapshots, ANamedOneIsUsedOrRefused) {
  damage(last_, "flipped bit");
  const auto before = files_below(folder_.path());
  expect_failure(resume({"--resume=" + last_}), 75,
                 {last_ + "/rank00000.safetensors"});
  expect_failure(resume({"--resume=" + folder_ / "nowhere"}), 2,
                 {"nowhere", "no snapshot folder"});
  EXPECT_EQ(files_below(folder_.path()), before);
}

TEST_F(Snapshots, AnotherModelsSnapshotIsRefused) {
  const auto before = files_below(folder_.path());
  expect_failure(resume({"--resume", "--set", "model.intermediate_size=40"}), 2,
                 {"tensor model.layers.0.mlp."});
  EXPECT_EQ(files_below(folder_.path()), before);
}

TEST_F(Snapshots, ResumingWithoutAnyStartsFromTheBeginning) {
  ASSERT_TRUE(remove_path(folder_ / "runs").ok());
  const ChildResult r = resume({"--resume", "--set", "train.steps=1"});
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_NE(r.out.find("starting from the beginning"), std::string::npos);
}

// --- Disk

// A file system of `options` over `folder`, in the child alone. False: not
// permitted here.
bool mount_over(const std::string& folder, unsigned long flags,
                const std::string& options) {
  return unshare(CLONE_NEWNS) == 0 &&
         mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("none", folder.c_str(), "tmpfs", flags, options.c_str()) == 0;
}

class Disk : public testing::Test {
 protected:
  void SetUp() override {
    config_ = small_config(folder_);
    ASSERT_TRUE(make_directories(folder_ / "runs").ok());
  }
  ChildResult train(std::function<void()> before_exec, const Words& more = {}) {
    return tapeline_run(Words{"train", "--config", config_} + more,
                        {.environment = {},
                         .folder = {},
                         .before_exec = std::move(before_exec)});
  }
  void limit_files(rlim_t bytes) {
    const rlimit limit = {bytes, bytes};
    setrlimit(RLIMIT_FSIZE, &limit);
  }

  TempFolder folder_;
  std::string config_;
};

TEST_F(Disk, AFullOneEndsWith74BeforeTheFirstStep) {
  const std::string runs = folder_ / "runs";
  const ChildResult r = train([&] {
    // Where mounting is not permitted, files that may not grow stand in.
    if (!mount_over(runs, 0, "size=600k")) limit_files(300 << 10);
  });
  expect_failure(r, 74, {runs});
}

TEST_F(Disk, OneThatFillsUpKeepsTheEarlierSnapshot) {
  ASSERT_EQ(train({}, {"--set", "train.steps=2"}).code, 0);
  const auto snapshot = files_below(folder_ / "runs/small/snapshots");
  ASSERT_GE(snapshot.size(), 5u);
  // The tensors of a snapshot do not fit into a file of 100 KiB.
  const ChildResult r = train([&] { limit_files(100 << 10); }, {"--resume"});
  expect_failure(r, 74, {"rank00000.safetensors", "File too large"});
  EXPECT_EQ(files_below(folder_ / "runs/small/snapshots"), snapshot);
  EXPECT_EQ(train({}, {"--resume"}).code, 0);
}

TEST_F(Disk, ErrorsOfAnyWriteEndWith74) {
  for (const char* fault : {"enospc:1+", "eio:20+", "enospc:40+"}) {
    SCOPED_TRACE(fault);
    const ChildResult r =
        tapeline_run({"train", "--config", config_},
                     {.environment = {{"TAPELINE_FAULT", fault}},
                      .folder = {},
                      .before_exec = {}});
    expect_failure(r, 74, {"runs/small"});
  }
}

TEST_F(Disk, AReadOnlyFolderEndsWith74) {
  const std::string runs = folder_ / "runs";
  bool mounted = geteuid() == 0;
  const ChildResult r = train(
      [&] {
        if (geteuid() != 0) {
          chmod(runs.c_str(), 0500);
        } else if (!mount_over(runs, MS_RDONLY, "")) {
          _exit(99);
        }
      },
      {});
  if (mounted && r.code == 99) {
    // Root without the right to mount: a path that nobody can make.
    expect_failure(train({}, {"--set", "run.dir=/proc/runs"}), 74, {"/proc"});
    return;
  }
  expect_failure(r, 74, {runs});
}

TEST_F(Disk, AFileInTheWayEndsWith74) {
  folder_.write("file", "");
  expect_failure(train({}, {"--set", "run.dir=\"" + folder_ / "file" + "\""}),
                 74, {"file"});
}

}  // namespace
}  // namespace tapeline
