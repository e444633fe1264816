// tapeline parity as a child process: exit codes, JSON, and one line for each
// thing that is wrong.
#include <algorithm>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/json.h"
#include "tests/cli/child.h"

namespace tapeline {
namespace {

const std::string kModel = "tests/data/qwen3moe/fp32";
const std::string kGolden = kModel + "/main.safetensors";

TEST(ParityVerb, PrintsTheReportAsJson) {
  const ChildResult r = tapeline_run(
      {"parity", "--model", kModel, "--golden", kGolden, "--json"});
  EXPECT_EQ(r.code, 0) << r.err;
  const absl::StatusOr<Json> json = parse_json(r.out, "stdout");
  ASSERT_TRUE(json.ok()) << r.out;
  std::vector<std::string> keys;
  for (const auto& [key, value] : json->object()) keys.push_back(key);
  EXPECT_EQ(keys, (std::vector<std::string>{
                      "schema", "model", "golden", "kind", "dtype", "forms",
                      "pass", "in_golden", "inputs", "compared", "rows_tied",
                      "quantities", "unknown"}));
  EXPECT_EQ(json->find("schema")->integer(), 1);
  EXPECT_EQ(json->find("kind")->string(), "main");
  EXPECT_EQ(json->find("dtype")->string(), "f32");
  EXPECT_TRUE(json->find("pass")->boolean());
  EXPECT_EQ(
      json->find("compared")->integer(),
      json->find("in_golden")->integer() - json->find("inputs")->integer());
  int64_t tensors = 0;
  for (const Json& q : json->find("quantities")->array()) {
    tensors += q.find("tensors")->integer();
    EXPECT_TRUE(q.find("pass")->boolean());
    const Json* worst = q.find("worst");
    EXPECT_LE(worst->find("error")->number(),
              worst->find("tolerance")->number());
    EXPECT_FALSE(worst->find("tensor")->string().empty());
  }
  EXPECT_EQ(tensors, json->find("compared")->integer());
}

TEST(ParityVerb, ADifferenceIsExitOne) {
  // Another model of the same shapes does not exist; bf16 numbers under f32
  // tolerances do.
  const ChildResult r =
      tapeline_run({"parity", "--model", kModel, "--golden",
                    "tests/data/qwen3moe/bf16/main.safetensors"});
  EXPECT_EQ(r.code, 1) << r.err;
  EXPECT_NE(r.out.find("FAIL"), std::string::npos);
  EXPECT_NE(r.out.find("not equal"), std::string::npos);
}

struct Wrong {
  std::vector<std::string> arguments;
  int code;
  std::string says;
};

TEST(ParityVerb, SaysInOneLineWhatIsWrong) {
  const TempFolder folder;
  const std::string text = folder.write("text.safetensors", "no tensors here");
  const std::string empty = folder / "nothing";
  for (const Wrong& wrong : std::vector<Wrong>{
           {{"--golden", kGolden}, 64, "--model is missing"},
           {{"--model", kModel}, 64, "--golden is missing"},
           {{"--model", kModel, "--golden", kGolden, "--dtype", "f16"},
            64,
            "--dtype is 'f16'; use f32 or bf16"},
           {{"--model", kModel, "--golden", kGolden, "--device", "tpu"},
            64,
            "--device is 'tpu'"},
           {{"--model", empty, "--golden", kGolden}, 2, empty},
           {{"--model", kModel, "--golden", empty}, 2, empty},
           {{"--model", kModel, "--golden", text}, 2, text},
           {{"--model", kModel, "--golden", kModel + "/model.safetensors"},
            2,
            "no kind of golden is known"},
           {{"--model", kModel, "--golden",
             "tests/data/qwen3/fp32/main.safetensors"},
            1,
            ""},
           {{"--model", kModel, "--golden", kModel + "/adamw_after.safetensors",
             "--inject_choices"},
            2,
            "--inject_choices is for goldens of kind main"},
       }) {
    std::vector<std::string> words = {"parity"};
    words.insert(words.end(), wrong.arguments.begin(), wrong.arguments.end());
    const ChildResult r = tapeline_run(words);
    EXPECT_EQ(r.code, wrong.code) << testing::PrintToString(words) << r.err;
    if (wrong.code == 1) continue;
    EXPECT_NE(r.err.find(wrong.says), std::string::npos) << r.err;
    EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
  }
}

}  // namespace
}  // namespace tapeline
