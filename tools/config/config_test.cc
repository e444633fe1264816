#include "tools/config/config.h"

#include <set>

#include "gtest/gtest.h"
#include "runtime/file.h"
#include "tools/config/settings.h"

namespace tapeline {
namespace {

// Stands for a model where a test is about something else.
constexpr char kModel[] = "model.model_type=glm_moe_dsa";

class ConfigTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "config_" +
              testing::UnitTest::GetInstance()->current_test_info()->name();
    ASSERT_TRUE(remove_path(folder_).ok());
    ASSERT_TRUE(make_directories(folder_).ok());
  }
  std::string put(const std::string& name, const std::string& text) {
    const std::string path = join_path(folder_, name);
    EXPECT_TRUE(make_directories(parent_path(path)).ok());
    EXPECT_TRUE(write_file_atomic(path, text).ok());
    return path;
  }
  std::string folder_;
};

Config loaded(const std::string& path, std::vector<std::string> sets = {}) {
  sets.push_back(kModel);
  const auto config = load_config(path, sets);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : Config();
}
std::string error_of(const std::string& path,
                     std::vector<std::string> sets = {}) {
  sets.push_back(kModel);
  const auto config = load_config(path, sets);
  EXPECT_FALSE(config.ok()) << "expected an error";
  return std::string(config.status().message());
}

TEST_F(ConfigTest, DefaultsAreThoseOfTheStruct) {
  const Config config = loaded("");
  EXPECT_EQ(config.train.steps, 1000);
  EXPECT_EQ(config.optimizer.name, "adamw");
  EXPECT_EQ(config.data.val, "king_james:val");
  EXPECT_EQ(config.origins.size(), 1u) << "the model type alone was set";
}

TEST_F(ConfigTest, ReadsEveryKindOfValue) {
  const Config config = loaded(put("a.toml", R"(
seed = 7
compute_dtype = "bf16"
[train]
steps = 20
max_norm = 2          # an integer where a number is wanted
[optimizer]
lr = 1e-3
muon_nesterov = false
[recompute]
keep = ["attention", "moe"]
[offload]
[debug]
trace = true
)"));
  EXPECT_EQ(config.seed, 7);
  EXPECT_EQ(config.compute_dtype, "bf16");
  EXPECT_EQ(config.train.steps, 20);
  EXPECT_EQ(config.train.max_norm, 2.0);
  EXPECT_EQ(config.optimizer.lr, 1e-3);
  EXPECT_FALSE(config.optimizer.muon_nesterov);
  EXPECT_EQ(config.recompute.keep,
            (std::vector<std::string>{"attention", "moe"}));
  EXPECT_TRUE(config.debug.trace);
}

TEST_F(ConfigTest, ModelKeysKeepOrderNestingAndKinds) {
  const Config config = loaded(put("a.toml", R"(
[model]
hidden_size = 128
rms_norm_eps = 1e-05
indexer_types = ["full", "shared"]
tie_word_embeddings = false
rope_parameters = {rope_theta = 10000.0, rope_type = "default"}
[model.quantization]
)"));
  EXPECT_EQ(config.model.keys.dump(),
            R"({"hidden_size": 128, "rms_norm_eps": 1e-05, "indexer_types": )"
            R"(["full", "shared"], "tie_word_embeddings": false, )"
            R"("rope_parameters": {"rope_theta": 10000.0, "rope_type": )"
            R"("default"}, "quantization": {}, "model_type": "glm_moe_dsa"})");
  EXPECT_EQ(config.model.path, "");
}

TEST_F(ConfigTest, LaterWins) {
  put("base/far.toml",
      "seed = 1\n[train]\nsteps = 1\nseq_len = 1\n"
      "micro_batches = 1\n[model]\nhidden_size = 1\n"
      "layers = [1, 2, 3]\nrope.theta = 1.0\n");
  put("base/near.toml",
      "extends = 'far.toml'\n[train]\nseq_len = 2\n"
      "micro_batches = 2\n[model]\nlayers = [4]\n"
      "rope.kind = 'x'\n");
  const std::string file = put("run.toml",
                               "[train]\nmicro_batches = 3\n"
                               "[data]\ntrain = 'x.txt'\n");
  // `extends` is read first wherever it stands in the file.
  ASSERT_TRUE(write_file_atomic(file, "seed = 5\nextends = 'base/near.toml'\n" +
                                          *read_file(file))
                  .ok());
  const Config config =
      loaded(file, {"train.threads=2", "train.threads=4", "data.val=y.txt"});
  EXPECT_EQ(config.seed, 5);
  EXPECT_EQ(config.train.steps, 1);
  EXPECT_EQ(config.train.seq_len, 2);
  EXPECT_EQ(config.train.micro_batches, 3);
  EXPECT_EQ(config.train.threads, 4);
  EXPECT_EQ(config.data.train, "x.txt");
  EXPECT_EQ(config.data.val, "y.txt");
  EXPECT_EQ(config.model.keys.find("layers")->dump(), "[4]");
  EXPECT_EQ(config.model.keys.find("rope")->dump(),
            R"({"theta": 1.0, "kind": "x"})");
  EXPECT_EQ(config.origins.at("train.steps"),
            join_path(folder_, "base/far.toml:3"));
  EXPECT_EQ(config.origins.at("train.micro_batches"), file + ":4");
  EXPECT_EQ(config.origins.at("train.threads"), "--set");
  EXPECT_FALSE(config.origins.contains("train.max_norm"));
}

TEST_F(ConfigTest, CyclesAndLostBasesAreErrors) {
  put("a.toml", "extends = 'b.toml'\n");
  const std::string b = put("b.toml", "extends = './a.toml'\n");
  EXPECT_NE(error_of(b).find("b.toml: extends itself, by way of "),
            std::string::npos)
      << error_of(b);
  const std::string self = put("self.toml", "extends = 'self.toml'\n");
  EXPECT_NE(error_of(self).find("extends itself"), std::string::npos);
  const std::string lost = put("lost.toml", "\nextends = 'none.toml'\n");
  EXPECT_EQ(error_of(lost), lost + ":2:1: " + join_path(folder_, "none.toml") +
                                ": open failed: No such file or directory");
  EXPECT_EQ(error_of(put("n.toml", "extends = 3\n")),
            join_path(folder_, "n.toml") +
                ":1:1: 'extends' must be the name of a file");
  // One base used by two branches of a chain is no cycle.
  for (int i = 0; i < 20; ++i) {
    put("deep" + std::to_string(i) + ".toml",
        "extends = 'deep" + std::to_string(i + 1) + ".toml'\n");
  }
  EXPECT_NE(error_of(join_path(folder_, "deep0.toml")).find("16 files deep"),
            std::string::npos);
  EXPECT_EQ(load_config(join_path(folder_, "gone.toml"), {}).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(ConfigTest, ErrorsSayWhereAndWhat) {
  const struct {
    const char* text;
    const char* error;
  } cases[] = {
      {"sede = 1\n", ":1:1: unknown key 'sede'; did you mean 'seed'?"},
      {"[train]\nstpes = 1\n",
       ":2:1: unknown key 'train.stpes'; did you mean 'train.steps'?"},
      {"[train]\nlr = 1\n",
       ":2:1: unknown key 'train.lr'; did you mean 'optimizer.lr'?"},
      {"[trian]\n", ":1:2: unknown table 'trian'; did you mean 'train'?"},
      {"lr = 1\n", ":1:1: unknown key 'lr'; did you mean 'optimizer.lr'?"},
      {"train = 1\n", ":1:1: 'train' is a table; did you mean 'train.steps'?"},
      {"model = 1\n", ":1:1: 'model' is a table; did you mean 'model.path'?"},
      {"[train.steps]\nx = 1\n",
       ":2:1: unknown key 'train.steps.x'; did you "
       "mean 'train.steps'?"},
      {"[train.steps]\n", ":1:8: 'train.steps' must be an integer, not null"},
      {"[train]\nsteps = 1.5\n",
       ":2:1: 'train.steps' must be an integer, not number 1.5"},
      {"[train]\nsteps = '5'\n",
       ":2:1: 'train.steps' must be an integer, not string \"5\""},
      {"[train]\nsteps = 0\n", ":2:1: 'train.steps' must be at least 1"},
      {"[train]\nseq_len = -3\n", ":2:1: 'train.seq_len' must be at least 1"},
      {"[optimizer]\nbeta1 = 1\n", ":2:1: 'optimizer.beta1' must be below 1"},
      {"[optimizer]\neps = 0\n", ":2:1: 'optimizer.eps' must be above 0"},
      {"[optimizer]\nlr = nan\n", ":2:1: 'optimizer.lr' must be at least 0"},
      {"[optimizer]\nname = 'adam'\n",
       ":2:1: 'optimizer.name' must be one of adamw muon; did you mean "
       "'adamw'?"},
      {"[run]\nname = 3\n", ":2:1: 'run.name' must be a string, not integer 3"},
      {"[debug]\ntrace = 1\n",
       ":2:1: 'debug.trace' must be true or false, not integer 1"},
      {"[recompute]\nkeep = 'a'\n",
       ":2:1: 'recompute.keep' must be an array of strings, not string \"a\""},
      {"[recompute]\nkeep = ['a', 1]\n",
       ":2:1: 'recompute.keep' must be an array of strings, not array"},
      {"[run]\nname = ''\n", "run.name is empty"},
      {"[train]\nkeep_snapshots = 1\n",
       ":2:1: 'train.keep_snapshots' must be at least 2"},
      {"[train]\nthreads = 1025\n",
       ":2:1: 'train.threads' must be at most 1024"},
      {"[train]\nmicro_batches = 65537\n",
       ":2:1: 'train.micro_batches' must be at most 65536"},
      {"[train]\nseq_len = 1048577\n",
       ":2:1: 'train.seq_len' must be at most 1048576"},
      {"[offload]\npinned_cap_mib = 1073741825\n",
       ":2:1: 'offload.pinned_cap_mib' must be at most 1073741824"},
      {"[train]\nsteps = 9007199254740992\n",
       "train.steps is 9007199254740992: "},
      {"a = \n", ":1:5: "},
  };
  for (const auto& c : cases) {
    const std::string path = put("x.toml", c.text);
    const std::string error = error_of(path);
    const std::string expected =
        c.error[0] == ':' ? path + c.error : std::string(c.error);
    EXPECT_EQ(error.substr(0, expected.size()), expected) << c.text;
  }
}

TEST_F(ConfigTest, AModelIsNeeded) {
  EXPECT_TRUE(std::string(load_config("", {}).status().message())
                  .starts_with("no model: set model.path"));
  EXPECT_TRUE(load_config("", {"model.path=out/hf"}).ok());
  EXPECT_EQ(load_config("", {"model.path=out/hf"})->model.path, "out/hf");
  EXPECT_TRUE(
      load_config("", {"model.path=out/hf"})->model.keys.object().empty());
}

TEST_F(ConfigTest, SetTakesTomlOrBareWords) {
  const Config config = loaded(
      "",
      {"train.steps=20", "optimizer.lr=1e-3", "debug.trace=true",
       "data.train=king_james:test", "run.name=2024-01-01", "run.dir=12",
       "sample.prompt='a = b'", "recompute.keep=[\"x\", \"y\"]",
       "model.hidden_size=64", "model.kind=word", "model.name=\"a b\"",
       "model.rope_parameters={theta = 1.5, deep = {x = 1}}",
       "model.\"odd key\".x=1", "sample.temperature=0", "pipeline.layout="});
  EXPECT_EQ(config.train.steps, 20);
  EXPECT_EQ(config.optimizer.lr, 1e-3);
  EXPECT_TRUE(config.debug.trace);
  EXPECT_EQ(config.data.train, "king_james:test");
  EXPECT_EQ(config.run.name, "2024-01-01");
  EXPECT_EQ(config.run.dir, "12");
  EXPECT_EQ(config.sample.prompt, "a = b");
  EXPECT_EQ(config.recompute.keep, (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(config.sample.temperature, 0.0);
  EXPECT_EQ(config.pipeline.layout, "");
  EXPECT_EQ(config.model.keys.dump(),
            R"({"hidden_size": 64, "kind": "word", "name": "a b", )"
            R"("rope_parameters": {"theta": 1.5, "deep": {"x": 1}}, )"
            R"("odd key": {"x": 1}, "model_type": "glm_moe_dsa"})");
}

TEST_F(ConfigTest, SetErrorsQuoteTheFlag) {
  const struct {
    const char* set;
    const char* error;
  } cases[] = {
      {"train.stpes=5",
       "--set train.stpes=5: unknown key 'train.stpes'; did you mean "
       "'train.steps'?"},
      {"train.steps", "--set train.steps: needs key=value"},
      {"=5", "--set =5: '' is no key"},
      {"a b=5", "--set a b=5: 'a b' is no key"},
      {"train.steps=", "--set train.steps=:1:"},
      {"train.steps=word",
       "--set train.steps=word: 'train.steps' must be an integer, not string"},
      {"train.steps=[1", "--set train.steps=[1:1:"},
      {"train.steps=1\nseed = 2", "--set train.steps=1\nseed = 2: sets more"},
      {"data.train=\xff", "--set data.train=\xff: is not UTF-8"},
  };
  for (const auto& c : cases) {
    const std::string error = error_of("", {c.set});
    EXPECT_TRUE(error.starts_with(c.error)) << error;
  }
}

TEST_F(ConfigTest, ReplacingATableOrAValueMovesItsOrigin) {
  const Config config = loaded("", {"model.rope={theta=1.0}", "model.rope=none",
                                    "model.a=1", "model.a.b=2"});
  EXPECT_EQ(config.model.keys.find("rope")->string(), "none");
  EXPECT_EQ(config.model.keys.find("a")->dump(), R"({"b": 2})");
  EXPECT_TRUE(config.origins.contains("model.rope"));
  EXPECT_FALSE(config.origins.contains("model.rope.theta"));
  EXPECT_TRUE(config.origins.contains("model.a.b"));
  EXPECT_FALSE(config.origins.contains("model.a"));
}

TEST_F(ConfigTest, PrintedConfigReadsBackTheSame) {
  const Config config = loaded(
      put("x.toml",
          "seed = 9\n[model]\nhidden_size = 64\n"
          "rope.theta = 1e6\nrope.none = {}\neps = 1e-05\n"
          "list = [1, 2.0, 'a', {k = true}]\n\"odd key\" = \"\\n\"\n"),
      {"optimizer.lr=0.1", "run.dir=a\tb \"c\" \xc3\xa4", "train.threads=3"});
  const std::string text = print_config(config);
  const std::string printed = put("printed.toml", text);
  const auto again = load_config(printed, {});
  ASSERT_TRUE(again.ok()) << again.status() << "\n" << text;
  // Field by field, and every value of the print now has an origin.
  std::vector<std::string> first, second;
  visit_settings(
      config, [&](const char*, const auto& value, const Limits&, const char*) {
        std::ostringstream out;
        if constexpr (requires { out << value; }) out << value;
        first.push_back(out.str());
      });
  visit_settings(*again, [&](const char* key, const auto& value, const Limits&,
                             const char*) {
    std::ostringstream out;
    if constexpr (requires { out << value; }) out << value;
    second.push_back(out.str());
    EXPECT_TRUE(again->origins.contains(key)) << key;
  });
  EXPECT_EQ(first, second);
  EXPECT_EQ(config.model.keys, again->model.keys);
  EXPECT_EQ(config.model.keys.dump(), again->model.keys.dump());
  // Values alone agree line by line as well.
  const auto values = [](const std::string& printed_text) {
    std::string out;
    size_t at = 0;
    while (at < printed_text.size()) {
      const size_t end = printed_text.find('\n', at);
      const std::string line = printed_text.substr(at, end - at);
      out += line.substr(0, line.rfind("  # ")) + "\n";
      at = end + 1;
    }
    return out;
  };
  EXPECT_EQ(values(text), values(print_config(*again)));
}

TEST_F(ConfigTest, PrintShowsOrigins) {
  const std::string path = put("x.toml", "\n[train]\nsteps = 3\n");
  const std::string text = print_config(loaded(path, {"seed=4"}));
  EXPECT_TRUE(
      text.starts_with("seed = 4  # --set\n"
                       "device = \"auto\"  # default\n"))
      << text;
  EXPECT_NE(text.find("\n[train]\nsteps = 3  # " + path + ":3\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("\n[model]\npath = \"\"  # default\n"
                      "model_type = \"glm_moe_dsa\"  # --set\n"),
            std::string::npos)
      << text;
}

TEST(Settings, AreCompleteAndWithinTheirOwnLimits) {
  Config config;
  std::set<std::string> keys;
  std::vector<std::string> sections;
  visit_settings(config, [&](const char* key, auto& value, const Limits& limits,
                             const char* meaning) {
    EXPECT_TRUE(keys.insert(key).second) << key << " appears twice";
    EXPECT_NE(std::string(meaning), "") << key;
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(value)>>) {
      const auto number = static_cast<double>(value);
      EXPECT_TRUE(number >= limits.least && number <= limits.most) << key;
    }
    const std::string section =
        std::string(key).substr(0, std::string(key).find('.'));
    if (sections.empty() || sections.back() != section) {
      sections.push_back(section);
    }
  });
  // Printing opens each table once.
  const std::set<std::string> distinct(sections.begin(), sections.end());
  EXPECT_EQ(sections.size(), distinct.size());
  for (const char* promised : {"run.dir",
                               "run.name",
                               "seed",
                               "device",
                               "compute_dtype",
                               "train.steps",
                               "train.seq_len",
                               "train.micro_batches",
                               "train.max_norm",
                               "data.train",
                               "data.val",
                               "model.path",
                               "recompute.policy",
                               "recompute.every",
                               "recompute.ratio",
                               "recompute.keep",
                               "offload.activations",
                               "offload.ids",
                               "offload.strict",
                               "offload.pinned_cap_mib",
                               "pipeline.schedule",
                               "pipeline.ranks",
                               "pipeline.chunks",
                               "pipeline.layout",
                               "pipeline.file",
                               "debug.hash_every",
                               "debug.anomaly",
                               "debug.trace"}) {
    EXPECT_TRUE(keys.contains(promised)) << promised;
  }
}

TEST(Settings, MarkdownHasARowPerKey) {
  const std::string text = config_markdown();
  EXPECT_NE(text.find("| `train.steps` | integer | `1000` | >= 1 | optimizer "
                      "steps |\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("| `optimizer.beta1` | number | `0.9` | >= 0, < 1 |"),
            std::string::npos);
  EXPECT_NE(
      text.find("| `device` | string | `\"auto\"` | `auto`, `cpu`, `cuda` |"),
      std::string::npos);
}

}  // namespace
}  // namespace tapeline
