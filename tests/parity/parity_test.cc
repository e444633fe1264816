// Every golden of every family: the trainer's functions compute what
// transformers and the goldens' own reference recorded.
#include "tools/parity/parity.h"

#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/file.h"

namespace tapeline {
namespace {

struct Case {
  std::string family, file;
  bool bf16 = false;

  std::string model() const { return "tests/data/" + family + "/fp32"; }
  std::string golden() const {
    return "tests/data/" + family + (bf16 ? "/bf16/" : "/fp32/") + file +
           ".safetensors";
  }
  friend std::ostream& operator<<(std::ostream& out, const Case& c) {
    return out << c.golden();
  }
};

const std::vector<std::string>& kinds() {
  static const std::vector<std::string>& kinds = *new std::vector<std::string>{
      "main", "mtp_pre", "mtp_post", "indexer_kl", "router_aux", "adamw_after"};
  return kinds;
}

// What each archive holds; a test checks that there is nothing else.
std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* family, std::set<std::string> files) {
    for (const std::string& kind : kinds()) {
      if (files.contains(kind)) cases.push_back({family, kind});
    }
    if (is_directory(std::string("tests/data/") + family + "/bf16")) {
      cases.push_back({family, "main", true});
    }
  };
  add("llama", {"main", "adamw_after"});
  add("qwen3", {"main", "adamw_after"});
  add("qwen3moe", {"main", "adamw_after"});
  add("glm", {"main", "mtp_pre", "mtp_post", "indexer_kl", "router_aux",
              "adamw_after"});
  add("glm_kernel", {"main", "indexer_kl", "router_aux", "adamw_after"});
  add("dsv3", {"main", "mtp_pre", "mtp_post", "router_aux", "adamw_after"});
  add("dsv32", {"main", "mtp_pre", "mtp_post", "indexer_kl", "router_aux",
                "adamw_after"});
  add("glm_variant", {"main", "mtp_pre", "mtp_post", "indexer_kl", "router_aux",
                      "adamw_after"});
  add("qwen3moe_variant", {"main", "adamw_after"});
  return cases;
}

class Parity : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Goldens, Parity, testing::ValuesIn(all_cases()),
                         [](const auto& info) {
                           return info.param.family + "_" + info.param.file +
                                  (info.param.bf16 ? "_bf16" : "");
                         });

TEST_P(Parity, EveryTensorOfTheGoldenIsEqual) {
  ParityOptions options{GetParam().model(), GetParam().golden(), DType::kF32,
                        false};
  if (GetParam().bf16) {
    options.dtype = DType::kBf16;
    options.inject_choices = true;
  }
  const absl::StatusOr<ParityReport> report = check_parity(options);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->kind, GetParam().file);
  EXPECT_EQ(report->compared, report->in_golden - report->inputs);
  EXPECT_GT(report->compared, 0);
  for (const QuantityReport& q : report->quantities) {
    for (const Comparison& c : q.failed) {
      ADD_FAILURE() << c.tensor << ": error " << c.error << " of "
                    << c.tolerance << ", form " << c.form << "; " << c.note;
    }
  }
  for (const std::string& name : report->unknown) ADD_FAILURE() << name;
  EXPECT_TRUE(report->pass());
  // Latent attention runs in both forms; over all keys in f32 alone.
  const std::string& family = GetParam().family;
  const bool latent = family.starts_with("glm") || family == "dsv32" ||
                      (family == "dsv3" && !GetParam().bf16);
  EXPECT_EQ(report->forms.size(), latent ? 2u : 1u);
}

// Of an archive that is not there (the GPU bundle lacks the largest) nothing is
// asked; where its cases run they fail without it.
TEST(Parity, NoGoldenOfTheArchivesIsLeftOut) {
  std::set<std::string> listed;
  for (const Case& c : all_cases()) {
    if (is_directory("tests/data/" + c.family)) listed.insert(c.golden());
  }
  int files = 0;
  for (const char* family :
       {"llama", "qwen3", "qwen3moe", "glm", "glm_kernel", "dsv3", "dsv32",
        "glm_variant", "qwen3moe_variant"}) {
    for (const char* dtype : {"fp32", "bf16"}) {
      const std::string folder =
          std::string("tests/data/") + family + "/" + dtype;
      if (!is_directory(folder)) continue;
      const absl::StatusOr<std::vector<std::string>> names =
          list_directory(folder);
      ASSERT_TRUE(names.ok()) << names.status().message();
      for (const std::string& name : *names) {
        if (!name.ends_with(".safetensors") || name == "model.safetensors") {
          continue;
        }
        EXPECT_TRUE(listed.contains(folder + "/" + name)) << name;
        ++files;
      }
    }
  }
  EXPECT_GT(files, 0);
  EXPECT_EQ(files, static_cast<int>(listed.size()));
}

// A choice is injected where it says so: without injection bf16 takes its own.
TEST(Parity, InjectedChoicesAreInputs) {
  const ParityOptions options{"tests/data/glm/fp32",
                              "tests/data/glm/bf16/main.safetensors",
                              DType::kBf16, true};
  const absl::StatusOr<ParityReport> injected = check_parity(options);
  ASSERT_TRUE(injected.ok());
  EXPECT_EQ(injected->inputs, 5 + 4 + 4);
  ParityOptions free = options;
  free.inject_choices = false;
  const absl::StatusOr<ParityReport> own = check_parity(free);
  ASSERT_TRUE(own.ok());
  EXPECT_EQ(own->inputs, 5);
  EXPECT_FALSE(own->pass());  // near ties flip in bf16
}

// Three indexer heads give many scores of exactly zero: the tokens behind a
// sequence's end are alike.
TEST(Parity, TiedSelectionsAreTheGoldens) {
  const absl::StatusOr<ParityReport> report = check_parity(
      {"tests/data/glm_variant/fp32",
       "tests/data/glm_variant/fp32/mtp_pre.safetensors", DType::kF32, false});
  ASSERT_TRUE(report.ok());
  EXPECT_TRUE(report->pass());
  EXPECT_EQ(report->rows_tied, 8);
}

}  // namespace
}  // namespace tapeline
