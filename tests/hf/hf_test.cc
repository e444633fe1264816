// Hugging Face folders in and out: what was read is written again, byte for
// byte, and what contradicts itself is refused. Each family also generates.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/file.h"
#include "runtime/hash.h"
#include "runtime/json.h"
#include "runtime/safetensors.h"
#include "runtime/status.h"
#include "tests/cli/child.h"
#include "tests/cli/expect.h"
#include "tests/support/tensor_file.h"

namespace tapeline {
namespace {

// A model's folder of its own, which a test may change.
class Folder {
 public:
  explicit Folder(const std::string& fixture) : path_(temp_ / "model") {
    copy(fixture + "/config.json", "config.json");
    copy(fixture + "/model.safetensors", "model.safetensors");
  }
  const std::string& path() const { return path_; }
  std::string out() const { return temp_ / "out"; }
  std::string weights() const { return path_ + "/model.safetensors"; }
  void write(const std::string& name, const std::string& text) const {
    CHECK_OK(make_directories(path_));
    CHECK_OK(write_file_atomic(path_ + "/" + name, text));
  }
  void write(const TensorFile& file) const {
    CHECK_OK(write_safetensors(weights(), file.tensors, file.metadata));
  }
  Json config() const { return read_json(path_ + "/config.json").value(); }
  void write(const Json& config) const {
    CHECK_OK(write_json(path_ + "/config.json", config));
  }
  ChildResult save(std::vector<std::string> flags = {}) const {
    std::vector<std::string> words = {"ckpt", "export", path_, out()};
    words.insert(words.end(), flags.begin(), flags.end());
    return tapeline_run(words);
  }

 private:
  void copy(const std::string& from, const std::string& name) const {
    write(name, read_file(from).value());
  }
  TempFolder temp_;
  std::string path_;
};

void expect_same_tensors(const TensorFile& got, const TensorFile& want) {
  ASSERT_EQ(got.bytes.size(), want.bytes.size());
  for (size_t i = 0; i < want.tensors.size(); ++i) {
    const NamedBytes& a = got.tensors[i];
    const NamedBytes& b = want.tensors[i];
    EXPECT_EQ(a.name, b.name);
    EXPECT_EQ(a.dtype, b.dtype) << a.name;
    EXPECT_EQ(a.shape, b.shape) << a.name;
    EXPECT_EQ(got.bytes.at(a.name), want.bytes.at(b.name)) << a.name;
  }
}

std::string saved(const Folder& folder) {
  const ChildResult r = folder.save();
  EXPECT_EQ(r.code, 0) << r.err;
  return folder.out();
}

class RoundTrip : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Fixtures, RoundTrip,
                         testing::Values("dsv3/fp32", "glm/fp32", "glm/bf16",
                                         "glm_kernel/fp32", "llama/fp32",
                                         "qwen3/fp32", "qwen3moe/fp32"),
                         [](const auto& info) {
                           std::string name = info.param;
                           name[name.find('/')] = '_';
                           return name;
                         });

TEST_P(RoundTrip, KeepsKeysBytesConfigAndFiles) {
  const Folder folder("tests/data/" + GetParam());
  Json config = folder.config();
  config["a_key_of_tomorrow"] = Json::Array{1, "two", nullptr};
  folder.write(config);
  const std::map<std::string, std::string> files = {
      {"generation_config.json", "{\"eos_token_id\":  [1, 2] }"},
      {"tokenizer.json", "{\"model\": {}}\n"},
      {"tokenizer_config.json", "{}"},
      {"special_tokens_map.json", "{}"},
      {"chat_template.jinja", "{{ messages }}"},
      {"merges.txt", "a b\n"}};
  for (const auto& [name, text] : files) folder.write(name, text);
  folder.write("notes.txt", "not part of the model");
  const std::string out = saved(folder);
  const TensorFile got = read_tensor_file(out + "/model.safetensors");
  expect_same_tensors(got, read_tensor_file(folder.weights()));
  EXPECT_EQ(got.metadata.at("format"), "pt");
  EXPECT_EQ(read_json(out + "/config.json").value(), config);
  for (const auto& [name, text] : files) {
    EXPECT_EQ(read_file(out + "/" + name).value(), text) << name;
  }
  EXPECT_FALSE(path_exists(out + "/notes.txt"));
}

// A bias of the router stays fp32 where all else is bf16.
TEST(Export, ToBf16KeepsRouterBiasesInFp32) {
  const Folder folder("tests/data/glm/fp32");
  const ChildResult r = folder.save({"--dtype", "bf16"});
  ASSERT_EQ(r.code, 0) << r.err;
  // The fixture's fp32 and bf16 files hold the same numbers.
  expect_same_tensors(
      read_tensor_file(folder.out() + "/model.safetensors"),
      read_tensor_file("tests/data/glm/bf16/model.safetensors"));
  EXPECT_EQ(read_json(folder.out() + "/config.json")->find("dtype")->string(),
            "bfloat16");
}

TEST(Export, DoesNotReplaceAFolder) {
  const Folder folder("tests/data/llama/fp32");
  saved(folder);
  expect_failure(folder.save(), 2, {folder.out(), "exists"});
}

TEST(Shards, AreReadAndSmallModelsWrittenAsOneFile) {
  const Folder folder("tests/data/qwen3moe/fp32");
  const TensorFile whole = read_tensor_file(folder.weights());
  ASSERT_TRUE(remove_path(folder.weights()).ok());
  ASSERT_TRUE(
      write_safetensors_shards(folder.path(), whole.tensors, 100000).ok());
  ASSERT_TRUE(path_exists(folder.path() + "/model.safetensors.index.json"));
  expect_same_tensors(read_tensor_file(saved(folder) + "/model.safetensors"),
                      whole);
}

// The same file with experts stacked, gate rows above up rows.
TensorFile stacked(const TensorFile& file) {
  TensorFile out;
  out.metadata = file.metadata;
  std::map<std::string, std::pair<Shape, std::vector<std::byte>>> stacks;
  for (const NamedBytes& t : file.tensors) {
    const size_t at = t.name.find(".experts.");
    if (at == std::string::npos) {
      out.bytes[t.name] = file.bytes.at(t.name);
      out.tensors.push_back(
          {t.name, t.dtype, t.shape, out.bytes[t.name].data()});
      continue;
    }
    const std::string layer = t.name.substr(0, at + 9);
    if (!t.name.ends_with(".0.gate_proj.weight")) continue;
    for (const bool down : {false, true}) {
      std::vector<std::byte> all;
      int64_t experts = 0;
      Shape shape;
      for (;; ++experts) {
        const std::string expert = layer + std::to_string(experts) + ".";
        if (!file.bytes.contains(expert + "down_proj.weight")) break;
        for (const char* part : {"gate_proj", "up_proj", "down_proj"}) {
          if (down != (std::string(part) == "down_proj")) continue;
          const auto& bytes = file.bytes.at(expert + part + ".weight");
          all.insert(all.end(), bytes.begin(), bytes.end());
        }
      }
      const int64_t f = t.shape[0], d = t.shape[1];
      shape = down ? Shape{experts, d, f} : Shape{experts, 2 * f, d};
      const std::string name = layer + (down ? "down_proj" : "gate_up_proj");
      out.bytes[name] = std::move(all);
      out.tensors.push_back({name, t.dtype, shape, out.bytes[name].data()});
    }
  }
  return out;
}

TEST(StackedExperts, AreReadAndWrittenOneByOne) {
  for (const char* fixture : {"tests/data/glm/fp32", "tests/data/dsv3/fp32",
                              "tests/data/qwen3moe/fp32"}) {
    const Folder folder(fixture);
    const TensorFile whole = read_tensor_file(folder.weights());
    const TensorFile stack = stacked(whole);
    EXPECT_LT(stack.tensors.size(), whole.tensors.size());
    folder.write(stack);
    expect_same_tensors(read_tensor_file(saved(folder) + "/model.safetensors"),
                        whole);
  }
}

TEST(StackedExperts, BesideSingleOnesAreRefused) {
  const Folder folder("tests/data/qwen3moe/fp32");
  TensorFile file = read_tensor_file(folder.weights());
  TensorFile stack = stacked(file);
  const std::string name = "model.layers.0.mlp.experts.down_proj";
  for (const NamedBytes& t : stack.tensors) {
    if (t.name == name) file.tensors.push_back(t);
  }
  folder.write(file);
  expect_failure(folder.save(), 2,
                 {name, "model.layers.0.mlp.experts.0.down_proj.weight"});
}

TEST(StackedExperts, OfAnotherNumberAreRefused) {
  const Folder folder("tests/data/qwen3moe/fp32");
  folder.write(stacked(read_tensor_file(folder.weights())));
  Json config = folder.config();
  config["num_experts"] = 6;
  folder.write(config);
  expect_failure(folder.save(), 2, {"[8, ", "[6, "});
}

// DeepSeek-V3's files repeat embedding and head in the prediction layer.
class Copies : public testing::Test {
 protected:
  void add(const Folder& folder, const std::string& name, const std::string& of,
           bool changed) {
    TensorFile file = read_tensor_file(folder.weights());
    std::vector<std::byte> bytes = file.bytes.at(of);
    if (changed) bytes[5] ^= std::byte{1};
    for (size_t i = 0; i < file.tensors.size(); ++i) {
      if (file.tensors[i].name != of) continue;
      file.bytes[name] = std::move(bytes);
      file.tensors.push_back({name, file.tensors[i].dtype,
                              file.tensors[i].shape, file.bytes[name].data()});
      break;
    }
    folder.write(file);
  }
};

TEST_F(Copies, ThatAreEqualAreKept) {
  const Folder folder("tests/data/dsv3/fp32");
  add(folder, "model.layers.4.embed_tokens.weight", "model.embed_tokens.weight",
      false);
  add(folder, "model.layers.4.shared_head.head.weight", "lm_head.weight",
      false);
  expect_same_tensors(read_tensor_file(saved(folder) + "/model.safetensors"),
                      read_tensor_file(folder.weights()));
}

TEST_F(Copies, ThatDifferAreRefusedWithBothNames) {
  const Folder folder("tests/data/dsv3/fp32");
  const std::string copy = "model.layers.4.shared_head.head.weight";
  add(folder, copy, "lm_head.weight", true);
  expect_failure(folder.save(), 2, {copy, "lm_head.weight"});
}

TEST_F(Copies, OfATiedHeadFollowTheConfig) {
  const Folder folder("tests/data/qwen3/fp32");
  add(folder, "lm_head.weight", "model.embed_tokens.weight", false);
  expect_same_tensors(read_tensor_file(saved(folder) + "/model.safetensors"),
                      read_tensor_file(folder.weights()));
  TensorFile file = read_tensor_file(folder.weights());
  file.bytes["lm_head.weight"][5] ^= std::byte{1};
  folder.write(file);
  const ChildResult r =
      tapeline_run({"generate", "--model", folder.path(), "--prompt", "a"});
  expect_failure(
      r, 2,
      {"lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings"});
}

TEST(Config, AnUntiedHeadMustBeInTheFile) {
  const Folder folder("tests/data/qwen3/fp32");
  Json config = folder.config();
  config["tie_word_embeddings"] = false;
  folder.write(config);
  expect_failure(folder.save(), 2, {"lm_head.weight", "missing"});
}

TEST(Config, ContradictionsNameBothValues) {
  struct Case {
    const char* fixture;
    const char* key;
    Json value;
    std::vector<std::string> parts;
  };
  for (const Case& c : std::vector<Case>{
           {"glm", "num_experts", 7, {"n_routed_experts", "8", "7"}},
           {"glm", "qk_head_dim", 99, {"99", "24"}},
           {"glm", "num_key_value_heads", 2, {"2", "num_attention_heads", "4"}},
           {"glm", "indexer_types", Json::Array{"full"}, {"1", "6"}},
           {"glm", "mlp_layer_types", Json::Array{"dense"}, {"1", "6"}},
           {"dsv3", "topk_group", 5, {"topk_group", "5", "4"}},
           {"dsv3", "num_experts_per_tok", 9, {"9", "8"}},
           {"dsv3", "q_lora_rank", nullptr, {"q_lora_rank"}},
           {"dsv3", "rope_theta", 500.0, {"500", "10000"}},
           {"llama",
            "rope_parameters",
            parse_json("{\"rope_theta\": 0.5}", "").value(),
            {"rope_theta is 0.5"}},
           {"llama",
            "rope_scaling",
            parse_json("{\"rope_type\": \"llama3\"}", "").value(),
            {"rope_parameters is", "rope_scaling is"}},
           {"glm", "v_head_dim", 620, {"620", "640"}},
           {"dsv3", "v_head_dim", 700, {"700", "640"}},
           {"llama", "num_key_value_heads", 3, {"3", "4"}},
       }) {
    const Folder folder(std::string("tests/data/") + c.fixture + "/fp32");
    Json config = folder.config();
    config[c.key] = c.value;
    folder.write(config);
    SCOPED_TRACE(c.key);
    expect_failure(folder.save(), 2, c.parts);
  }
}

TEST(Export, RefusesToLoseTensors) {
  // The file has a prediction layer that the config does not know.
  const Folder folder("tests/data/glm/fp32");
  Json config = folder.config();
  config["num_nextn_predict_layers"] = 0;
  folder.write(config);
  expect_failure(folder.save(), 2, {"model.layers.6.", "nothing was written"});
  EXPECT_FALSE(path_exists(folder.out()));
}

TEST(Export, RefusesToRoundMixedWeights) {
  const Folder folder("tests/data/llama/fp32");
  const TensorFile whole = read_tensor_file(folder.weights());
  CHECK_EQ(folder.save({"--dtype", "bf16"}).code, 0);
  TensorFile file = read_tensor_file(folder.out() + "/model.safetensors");
  for (NamedBytes& t : file.tensors) {
    if (t.name != "model.norm.weight") continue;
    file.bytes[t.name] = whole.bytes.at(t.name);
    t.data = file.bytes[t.name].data();
    t.dtype = DType::kF32;
  }
  folder.write(file);
  ASSERT_TRUE(remove_path(folder.out()).ok());
  expect_failure(folder.save(), 2, {"F32", "BF16", "--dtype"});
}

TEST(Export, TakesASlashBehindTheFolder) {
  const Folder folder("tests/data/llama/fp32");
  const ChildResult r =
      tapeline_run({"ckpt", "export", folder.path(), folder.out() + "//"});
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_TRUE(path_exists(folder.out() + "/config.json"));
  EXPECT_EQ(tapeline_run({"ckpt", "export", folder.path(), ""}).code, 64);
}

// What transformers saves: no prediction layer, but the key for it.
TEST(Config, AMissingPredictionLayerSaysWhatToDo) {
  const Folder folder("tests/data/dsv3/fp32");
  TensorFile file = read_tensor_file(folder.weights());
  std::erase_if(file.tensors, [](const NamedBytes& t) {
    return t.name.starts_with("model.layers.4.");
  });
  folder.write(file);
  expect_failure(folder.save(), 2, {"num_nextn_predict_layers 0"});
}

TEST(Config, BiasesOfProjectionsAreRefused) {
  const Folder folder("tests/data/llama/fp32");
  TensorFile file = read_tensor_file(folder.weights());
  const std::string name = "model.layers.0.self_attn.q_proj.bias";
  file.bytes[name].resize(64 * sizeof(float));
  file.tensors.push_back(
      {name, DType::kF32, Shape{64}, file.bytes[name].data()});
  folder.write(file);
  expect_failure(
      tapeline_run({"generate", "--model", folder.path(), "--prompt", "a"}), 2,
      {name});
}

TEST(Inspect, ListsEveryTensorWithItsHash) {
  const std::string folder = "tests/data/glm/fp32";
  const ChildResult r = tapeline_run({"ckpt", "inspect", folder, "--json"});
  ASSERT_EQ(r.code, 0) << r.err;
  const Json json = parse_json(r.out, "stdout").value();
  EXPECT_EQ(json.object()[0].first, "schema");
  const TensorFile file = read_tensor_file(folder + "/model.safetensors");
  const Json::Array& tensors = json.find("tensors")->array();
  ASSERT_EQ(tensors.size(), file.tensors.size());
  int64_t total = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const NamedBytes& t = file.tensors[i];
    const auto& bytes = file.bytes.at(t.name);
    EXPECT_EQ(tensors[i].find("name")->string(), t.name);
    EXPECT_EQ(tensors[i].find("dtype")->string(), "F32");
    EXPECT_EQ(tensors[i].find("shape")->array().size(),
              static_cast<size_t>(t.shape.rank()));
    EXPECT_EQ(tensors[i].find("file")->string(), "model.safetensors");
    EXPECT_EQ(tensors[i].find("xxh3")->string(),
              to_hex(hash_bytes(bytes.data(), bytes.size())));
    total += static_cast<int64_t>(bytes.size());
  }
  EXPECT_EQ(json.find("total_bytes")->integer(), total);
}

TEST(Inspect, VerifiesSnapshots) {
  const TempFolder folder;
  const ChildResult train = tapeline_run(
      {"train", "--config", small_config(folder), "--set", "train.steps=1"});
  ASSERT_EQ(train.code, 0) << train.err;
  const std::string snapshot = folder / "runs/small/snapshots/step_0000001";
  const ChildResult r = tapeline_run({"ckpt", "inspect", snapshot});
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_NE(r.out.find("optimizer."), std::string::npos);
  const std::string file = snapshot + "/rank00000.safetensors";
  std::string bytes = read_file(file).value();
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  ASSERT_TRUE(write_file_atomic(file, bytes).ok());
  expect_failure(tapeline_run({"ckpt", "inspect", snapshot}), 75,
                 {"rank00000.safetensors"});
  expect_failure(tapeline_run({"ckpt", "inspect", folder / "nowhere"}), 2,
                 {"nowhere"});
}

class Family : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, Family,
                         testing::Values("dsv3", "glm", "llama", "qwen3",
                                         "qwen3moe"),
                         [](const auto& info) { return info.param; });

TEST_P(Family, GreedyIdsAreTheSameWithAndWithoutTheCache) {
  const Folder folder("tests/data/" + GetParam() + "/fp32");
  Json config = folder.config();
  config["eos_token_id"] = nullptr;  // no early end
  folder.write(config);
  const std::vector<std::string> words = {
      "generate",         "--model",      folder.path(), "--prompt",
      "In the beginning", "--max_tokens", "200",         "--json"};
  std::vector<std::string> without = words;
  without.push_back("--no_cache");
  const ChildResult a = tapeline_run(words), b = tapeline_run(without);
  ASSERT_EQ(a.code, 0) << a.err;
  ASSERT_EQ(b.code, 0) << b.err;
  const Json cached = parse_json(a.out, "cached").value();
  const Json whole = parse_json(b.out, "whole").value();
  EXPECT_EQ(cached.find("ids")->array().size(), 200u);
  EXPECT_EQ(*cached.find("ids"), *whole.find("ids"));
}

TEST(PromptIds, AreContinuedLikeTheSameBytes) {
  const std::string model = "tests/data/llama/fp32";
  const ChildResult bytes =
      tapeline_run({"generate", "--model", model, "--prompt", "Ab", "--json"});
  const ChildResult ids = tapeline_run(
      {"generate", "--model", model, "--prompt_ids", "65,98", "--json"});
  ASSERT_EQ(bytes.code, 0) << bytes.err;
  EXPECT_EQ(ids.out, bytes.out);
  expect_failure(
      tapeline_run({"generate", "--model", model, "--prompt_ids", "1,-2"}), 64,
      {"1,-2"});
  expect_failure(tapeline_run({"generate", "--model", model, "--prompt_ids",
                               "1,2", "--prompt", "a"}),
                 64, {"--prompt_ids"});
}

TEST(PromptIds, AModelWithATokenizerSaysThatBytesAreRead) {
  const Folder folder("tests/data/llama/fp32");
  folder.write("tokenizer.json", "{}");
  const ChildResult r = tapeline_run(
      {"generate", "--model", folder.path(), "--prompt", "a", "--json"});
  EXPECT_EQ(r.code, 0);
  EXPECT_NE(r.err.find("tokenizer.json is not used"), std::string::npos);
}

TEST_P(Family, IsEvaluated) {
  const TempFolder folder;
  const std::string text = folder.write("text.txt", sample_text(20));
  const ChildResult r =
      tapeline_run({"eval", "--model", "tests/data/" + GetParam() + "/fp32",
                    "--data", text, "--json"});
  ASSERT_EQ(r.code, 0) << r.err;
  const Json json = parse_json(r.out, "eval").value();
  // A model of random weights knows nothing: about one of 128 tokens.
  EXPECT_GT(json.find("loss")->number(), 3);
  EXPECT_LT(json.find("loss")->number(), 9);
}

}  // namespace
}  // namespace tapeline
