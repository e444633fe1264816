// Golden values of a model folder, and comparing with them.
//
// Error is |a - b| / |b| in f64 over a tensor. Bounds are about ten times the
// goldens' own fp32 noise.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "autograd/gradients.h"
#include "gtest/gtest.h"
#include "models/batch.h"
#include "models/weights.h"
#include "runtime/json.h"
#include "runtime/safetensors.h"
#include "runtime/status.h"

namespace tapeline {

inline constexpr double kLossBound = 2e-6, kActivationBound = 1e-5,
                        kGradientBound = 3e-5, kIndexerBound = 1e-4;

inline SafetensorsReader open_golden(const std::string& path) {
  absl::StatusOr<SafetensorsReader> reader = SafetensorsReader::open(path);
  CHECK(reader.ok()) << reader.status().message();
  return *std::move(reader);
}

inline Json golden_config(const std::string& folder) {
  absl::StatusOr<Json> json = read_json(folder + "config.json");
  CHECK(json.ok()) << json.status().message();
  return *std::move(json);
}

inline Tensor golden(const SafetensorsReader& file, const std::string& name) {
  absl::StatusOr<Tensor> tensor = file.read_tensor(name);
  CHECK(tensor.ok()) << tensor.status().message();
  return *tensor;
}

inline std::vector<double> golden_values(const Tensor& t) {
  const std::vector<float> v = t.to_vector<float>();
  return {v.begin(), v.end()};
}

inline double relative_error(const Tensor& got, const Tensor& wanted) {
  const std::vector<double> a = golden_values(got), b = golden_values(wanted);
  CHECK_EQ(a.size(), b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  if (norm == 0) return difference == 0 ? 0 : 1;
  return std::sqrt(difference / norm);
}

inline HostBatch golden_batch(const SafetensorsReader& file) {
  return {golden(file, "input_ids").to_vector<int32_t>(),
          golden(file, "labels_shifted").to_vector<int32_t>(),
          golden(file, "cu_seqlens").to_vector<int32_t>()};
}

// Compares every tensor of the golden whose key starts with `only`, which
// starts with `prefix`; what follows `prefix` is a parameter. Returns how many.
inline int expect_gradients(const std::vector<NamedTensor>& tensors,
                            ParameterGradients& grads,
                            const SafetensorsReader& file,
                            const std::string& prefix, const std::string& only,
                            double bound) {
  std::map<std::string, const NamedTensor*> by_name;
  for (const NamedTensor& t : tensors) by_name[t.name] = &t;
  std::map<const Parameter*, Tensor> sums;
  int compared = 0;
  for (const std::string& key : file.names()) {
    if (!key.starts_with(only)) continue;
    const std::string name = key.substr(prefix.size());
    const auto found = by_name.find(name);
    EXPECT_TRUE(found != by_name.end()) << "no tensor for " << key;
    if (found == by_name.end()) continue;
    const NamedTensor& t = *found->second;
    if (sums.find(t.parameter) == sums.end()) {
      sums[t.parameter] = grads.combined(*t.parameter);
    }
    const Tensor& sum = sums[t.parameter];
    EXPECT_TRUE(sum) << "no gradient reached " << name;
    if (!sum) continue;
    EXPECT_LE(relative_error(t.block(sum), golden(file, key)), bound) << key;
    ++compared;
  }
  return compared;
}

}  // namespace tapeline
