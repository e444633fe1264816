// The negative control: one element of a golden changed, and parity says which
// tensor. Once for each quantity of each kind of golden.
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/file.h"
#include "runtime/safetensors.h"
#include "runtime/status.h"
#include "tests/support/tensor_file.h"
#include "tools/parity/compare.h"
#include "tools/parity/parity.h"

namespace tapeline {
namespace {

constexpr const char* kModel = "tests/data/glm/fp32";
const std::set<std::string> kInputs = {
    "input_ids", "position_ids", "cu_seqlens", "labels", "labels_shifted"};

// A sign, or the lowest bit of an id, of an element that is not zero.
bool flip(const NamedBytes& tensor, std::vector<std::byte>& bytes) {
  if (tensor.dtype == DType::kI32) {
    bytes[0] ^= std::byte{1};
    return true;
  }
  CHECK(tensor.dtype == DType::kF32) << tensor.name;
  const auto n = static_cast<size_t>(tensor.shape.elements());
  // The first element of at least average size: a flipped tiny one is within
  // what rounding does to the tensor.
  double sum = 0;
  std::vector<float> values(n);
  std::memcpy(values.data(), bytes.data(), n * sizeof(float));
  size_t finite = 0;
  for (const float v : values) {
    if (!std::isfinite(v)) continue;
    sum += std::abs(v);
    ++finite;
  }
  for (size_t i = 0; i < n; ++i) {
    if (!std::isfinite(values[i]) || values[i] == 0 ||
        std::abs(values[i]) < sum / static_cast<double>(finite)) {
      continue;
    }
    values[i] = -values[i];
    std::memcpy(bytes.data(), values.data(), n * sizeof(float));
    return true;
  }
  return false;
}

class Negative : public testing::TestWithParam<std::string> {
 protected:
  // A folder for the changed golden beside what else it needs.
  std::string folder() const {
    return testing::TempDir() + "/negative_" + GetParam();
  }
  void SetUp() override {
    CHECK_OK(make_directories(folder()));
    for (const std::string name : {"meta.json", "main.safetensors"}) {
      const absl::StatusOr<std::string> text =
          read_file(std::string(kModel) + "/" + name);
      CHECK(text.ok()) << text.status().message();
      CHECK_OK(write_file_atomic(folder() + "/" + name, *text));
    }
  }
  ParityReport run(const TensorFile& file) const {
    const std::string path = folder() + "/" + GetParam() + ".safetensors";
    CHECK_OK(write_safetensors(path, file.tensors, file.metadata));
    absl::StatusOr<ParityReport> report =
        check_parity({kModel, path, DType::kF32, false});
    CHECK(report.ok()) << report.status().message();
    return *std::move(report);
  }
  std::string golden() const {
    return std::string(kModel) + "/" + GetParam() + ".safetensors";
  }
};
INSTANTIATE_TEST_SUITE_P(Kinds, Negative,
                         testing::Values("main", "mtp_pre", "mtp_post",
                                         "indexer_kl", "router_aux",
                                         "adamw_after"),
                         [](const auto& info) { return info.param; });

TEST_P(Negative, AFlippedElementOfEachQuantityIsNamed) {
  TensorFile file = read_tensor_file(golden());
  ASSERT_TRUE(run(file).pass()) << "a copy must pass";
  std::set<std::string> seen;
  for (const NamedBytes& tensor : file.tensors) {
    if (kInputs.contains(tensor.name)) continue;
    if (seen.contains(quantity_of(tensor.name))) continue;
    std::vector<std::byte>& bytes = file.bytes[tensor.name];
    const std::vector<std::byte> before = bytes;
    if (!flip(tensor, bytes)) continue;  // all zero: another of its quantity
    seen.insert(quantity_of(tensor.name));
    const ParityReport report = run(file);
    std::copy(before.begin(), before.end(), bytes.begin());
    EXPECT_FALSE(report.pass()) << tensor.name;
    std::set<std::string> named;
    for (const QuantityReport& q : report.quantities) {
      for (const Comparison& c : q.failed) named.insert(c.tensor);
    }
    // Weights are compared by the expert beside them.
    std::set<std::string> allowed = {tensor.name};
    if (const size_t at = tensor.name.find("router_ids");
        at != std::string::npos) {
      std::string weights = tensor.name;
      allowed.insert(weights.replace(at, 10, "router_weights"));
    }
    EXPECT_TRUE(named.contains(tensor.name)) << tensor.name;
    for (const std::string& name : named) {
      EXPECT_TRUE(allowed.contains(name)) << name << " beside " << tensor.name;
    }
  }
  std::set<std::string> all;
  for (const NamedBytes& tensor : file.tensors) {
    if (!kInputs.contains(tensor.name)) all.insert(quantity_of(tensor.name));
  }
  EXPECT_EQ(seen, all);
}

TEST_P(Negative, AnotherShapeOfTheSameNumbersFails) {
  TensorFile file = read_tensor_file(golden());
  for (NamedBytes& tensor : file.tensors) {
    if (tensor.shape.rank() != 2 || tensor.shape[0] == tensor.shape[1]) {
      continue;
    }
    if (quantity_of(tensor.name) == "index_ids" ||
        quantity_of(tensor.name) == "router_ids") {
      continue;  // sets; another number of rows fails
    }
    std::swap(tensor.shape[0], tensor.shape[1]);
    EXPECT_FALSE(run(file).pass()) << tensor.name;
    return;
  }
}

TEST_P(Negative, AnUnknownTensorIsNamed) {
  TensorFile file = read_tensor_file(golden());
  const float value = 1;
  file.tensors.push_back({"hidden.99", DType::kF32, Shape{1},
                          reinterpret_cast<const std::byte*>(&value)});
  const ParityReport report = run(file);
  EXPECT_FALSE(report.pass());
  ASSERT_EQ(report.unknown.size(), 1u);
  EXPECT_TRUE(report.unknown[0].starts_with("hidden.99 "));
  EXPECT_EQ(report.compared, report.in_golden - report.inputs - 1);
}

// --- Wrong inputs are errors in one line, not results and not aborts

struct Wrong {
  std::string tensor;
  float value;
  bool inject;
  std::string says;
};

TEST(WrongGolden, IsRefused) {
  const std::string folder = testing::TempDir() + "/wrong";
  CHECK_OK(make_directories(folder));
  for (const Wrong& wrong : std::vector<Wrong>{
           {"router_ids.2", 100, true, "router_ids.2 row 0"},
           {"router_ids.2", -3, true, "router_ids.2 row 0"},
           {"router_ids.2", 0.5f, true, "router_ids.2 row 0"},
           {"index_ids.0", 47, true, "index_ids.0 row 0"},
           {"index_ids.0", 1e9f, true, "index_ids.0 row 0"},
           {"input_ids", 0.4f, false, "input_ids holds 0.4"},
           {"input_ids", 4000, false, "vocab_size is 128"},
           {"cu_seqlens", 1, false, "cu_seqlens does not rise"}}) {
    TensorFile file =
        read_tensor_file(std::string(kModel) + "/main.safetensors");
    // As floats, so that anything can be written.
    for (NamedBytes& t : file.tensors) {
      if (t.name != wrong.tensor) continue;
      std::vector<std::byte>& bytes = file.bytes[t.name];
      const auto n = static_cast<size_t>(t.shape.elements());
      std::vector<int32_t> ids(n);
      std::memcpy(ids.data(), bytes.data(), n * sizeof(int32_t));
      std::vector<float> values(ids.begin(), ids.end());
      values[0] = wrong.value;
      std::memcpy(bytes.data(), values.data(), n * sizeof(float));
      t.dtype = DType::kF32;
    }
    const std::string path = folder + "/main.safetensors";
    CHECK_OK(write_safetensors(path, file.tensors, file.metadata));
    const absl::StatusOr<ParityReport> report =
        check_parity({kModel, path, DType::kF32, wrong.inject});
    ASSERT_FALSE(report.ok()) << wrong.tensor << " " << wrong.value;
    EXPECT_NE(std::string(report.status().message()).find(wrong.says),
              std::string::npos)
        << report.status().message();
  }
}

}  // namespace
}  // namespace tapeline
