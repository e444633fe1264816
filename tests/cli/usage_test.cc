// What the binary answers to wrong flags, settings and data: the documented
// code and one line that says what is wrong, where, and what to do.
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/file.h"
#include "tests/cli/child.h"
#include "tests/cli/expect.h"

namespace tapeline {
namespace {

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
        UsageCase{"Parity", {"parity"}, {"--model is missing"}},
        UsageCase{"Plan", {"plan"}, {"--config is missing"}},
        UsageCase{"ScheduleOfWhat",
                  {"schedule"},
                  {"one of --name, --file and --validate"}},
        UsageCase{"ScheduleTwice",
                  {"schedule", "--name=1f1b", "--file=f"},
                  {"one of --name, --file and --validate"}},
        UsageCase{"ScheduleName",
                  {"schedule", "--name=1f1", "--ranks=2", "--micro_batches=2"},
                  {"--name is '1f1'", "did you mean '1f1b'"}},
        UsageCase{"ScheduleRanks",
                  {"schedule", "--name=1f1b", "--micro_batches=2"},
                  {"--ranks must be at least 1"}},
        UsageCase{"ScheduleSizeOfFile",
                  {"schedule", "--file=f", "--ranks=2"},
                  {"go with --name"}},
        UsageCase{"ScheduleCost",
                  {"schedule", "--name=1f1b", "--ranks=2", "--micro_batches=2",
                   "--cost=F=x"},
                  {"--cost has 'F=x'"}},
        UsageCase{"ScheduleCostOfWhat",
                  {"schedule", "--name=1f1b", "--ranks=2", "--micro_batches=2",
                   "--cost=F=1,X=2"},
                  {"--cost has 'X'"}},
        UsageCase{"ScheduleRelease",
                  {"schedule", "--name=1f1b", "--ranks=2", "--micro_batches=2",
                   "--ov_release=late"},
                  {"--ov_release is 'late'"}},
        UsageCase{"Bench", {"bench"}, {"--config is missing"}},
        UsageCase{"BenchOfWhat",
                  {"bench", "--config=f"},
                  {"give one of --fwd_bwd, --stages and --messages"}},
        UsageCase{"BenchOfTwo",
                  {"bench", "--config=f", "--fwd_bwd", "--stages"},
                  {"give one of --fwd_bwd, --stages and --messages"}},
        UsageCase{"BenchStagesBatch",
                  {"bench", "--config=f", "--stages", "--batch=2"},
                  {"--batch", "go with --fwd_bwd"}},
        UsageCase{"BenchStagesProcesses",
                  {"bench", "--config=f", "--stages", "--nproc=2"},
                  {"--nproc goes with --messages"}},
        UsageCase{"ScheduleCostTwice",
                  {"schedule", "--name=1f1b", "--ranks=2", "--micro_batches=2",
                   "--cost=F=1", "--stage_cost=f"},
                  {"--stage_cost goes with neither --cost nor --layout"}},
        UsageCase{"BenchBatch",
                  {"bench", "--config=f", "--fwd_bwd", "--batch=0"},
                  {"--batch must be from 1"}},
        UsageCase{"BenchSequence",
                  {"bench", "--config=f", "--fwd_bwd", "--seq=1048577"},
                  {"--seq must be from 1 to 1048576"}},
        UsageCase{"BenchRepeats",
                  {"bench", "--config=f", "--fwd_bwd", "--repeats=0"},
                  {"--repeats must be from 1"}},
        UsageCase{"Ckpt", {"ckpt", "inspect"}, {"tapeline ckpt inspect DIR"}},
        UsageCase{"CkptOfWhat", {"ckpt", "show", "x"}, {"ckpt inspect DIR"}},
        UsageCase{"CkptDtype",
                  {"ckpt", "export", "a", "b", "--dtype=f16"},
                  {"--dtype is 'f16'"}},
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
                  {"--threads must be"}},
        UsageCase{"NegativeThreads",
                  {"eval", "--model", "m", "--data", "d", "--threads=-1"},
                  {"--threads must be from 1 to 1024"}},
        UsageCase{
            "TooManyThreads",
            {"generate", "--model", "m", "--prompt", "a", "--threads=1025"},
            {"--threads must be from 1 to 1024"}}),
    [](const auto& info) { return info.param.name; });

TEST_P(Usage, EndsWith64AndOneLine) {
  const ChildResult r = tapeline_run(GetParam().words);
  expect_failure(r, 64, GetParam().parts);
  EXPECT_EQ(r.out, "");
}

TEST(Help, ListsVerbsThatWork) {
  const ChildResult r = tapeline_run({"--help"});
  EXPECT_EQ(r.code, 0);
  for (const char* verb : {"train", "generate", "eval", "plan", "bench", "ckpt",
                           "parity", "schedule"}) {
    EXPECT_NE(r.out.find(verb), std::string::npos) << verb;
    const ChildResult of = tapeline_run({verb, "--help"});
    EXPECT_EQ(of.code, 0);
    EXPECT_TRUE(of.out.starts_with(std::string("usage: tapeline ") + verb));
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
      {"MoreTokensThanCanBeCounted",
       [](const auto&) { return set("train.steps=9007199254740992000"); },
       {"train.steps is 9007199254740992000"}},
      {"TooManyMicroBatches",
       [](const auto&) { return set("train.micro_batches=65537"); },
       {"train.micro_batches", "at most 65536"}},
      {"RunNameWithASlash",
       [](const auto&) { return set("run.name=../other"); },
       {"run.name is \"../other\"", "letters, digits"}},
      {"HiddenRunName",
       [](const auto&) { return set("run.name=.git"); },
       {"run.name is \".git\""}},
      {"LongRunName",
       [](const auto&) { return set("run.name=" + std::string(65, 'a')); },
       {"at most 64"}},
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
      {"MoreDepthsThanLayersOfTheirOwn",
       [](const auto&) {
         return set("model.num_nextn_predict_layers=2") +
                set("loss.mtp_depths=3");
       },
       {"num_nextn_predict_layers is 2", "3 prediction depths"}},
      {"FarTooManyDepths",
       [](const auto&) { return set("loss.mtp_depths=4294967297"); },
       {"loss.mtp_depths", "4294967297"}},
      // On a machine with a GPU, of a build without CUDA.
      {"NoGpu",
       [](const auto&) { return set("device=cuda"); },
       {"CUDA", "device = \"cpu\""}},
      {"UnknownDevice",
       [](const auto&) { return set("device=tpu"); },
       {"device", "tpu"}},
      {"WatchingCudaOnACpu",
       [](const auto&) {
         return set("device=cpu") + set("debug.cuda_first=3");
       },
       {"debug.cuda_first", "on a CPU"}},
      {"LastWatchedStepWithoutAFirst",
       [](const auto&) { return set("debug.cuda_last=3"); },
       {"debug.cuda_last = 3", "debug.cuda_first = 0"}},
      {"UnknownModelKey",
       [](const auto&) { return set("model.hiden_size=64"); },
       {"model.hiden_size", "did you mean", "hidden_size"}},
      {"MoreLayersThanCanBe",
       [](const auto&) { return set("model.num_hidden_layers=2147483648"); },
       {"num_hidden_layers is 2147483648", "4096"}},
      {"RopeThetaTooSmall",
       [](const auto&) { return set("model.rope_theta=0.5"); },
       {"rope_theta"}},
      {"NegativeEpsilon",
       [](const auto&) { return set("model.rms_norm_eps=-1.0"); },
       {"rms_norm_eps is -1"}},
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

}  // namespace
}  // namespace tapeline
