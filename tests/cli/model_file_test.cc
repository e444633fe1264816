// Model files that are damaged or belong to another model are refused by every
// verb that reads one, and left as they are.
#include <cmath>
#include <cstring>
#include <string>

#include "gtest/gtest.h"
#include "runtime/file.h"
#include "runtime/json.h"
#include "runtime/safetensors.h"
#include "tests/cli/child.h"
#include "tests/cli/expect.h"

namespace tapeline {
namespace {

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

TEST_F(ModelFile, LogitsThatOverflowEndWith71) {
  const SafetensorsReader reader = SafetensorsReader::open(file_).value();
  const float huge[2] = {3e38f, -3e38f};
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), huge, 8);
  // Of the first two tokens one logit is +inf, the other -inf.
  overwrite(reader.find("model.norm.weight")->offset, bytes.substr(0, 4));
  const uint64_t head = reader.find("lm_head.weight")->offset;
  overwrite(head, bytes.substr(0, 4));
  overwrite(head + 4 * 32, bytes.substr(4, 4));
  expect_failure(tapeline_run({"generate", "--model", hf_, "--prompt", "a"}),
                 71, {"logits of token 1 are not finite"});
  expect_failure(
      tapeline_run({"eval", "--model", hf_, "--data", folder_ / "text.txt"}),
      71, {"the loss is not finite"});
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

}  // namespace
}  // namespace tapeline
