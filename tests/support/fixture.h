// Golden tensors of tests/data, by name.
//
//   const Fixture misc = Fixture::open("tests/data/ops/misc.safetensors");
//   x.set(misc.values("rms.x"));
//
// Paths are relative to the repository root, where Bazel runs a test; the file
// must be among the test's data. A missing file or name stops the test.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/safetensors.h"
#include "runtime/shape.h"

namespace tapeline {

class Fixture {
 public:
  static Fixture open(const std::string& path);

  bool has(std::string_view name) const;
  Shape shape(std::string_view name) const;
  // In row-major order; any dtype, exactly.
  std::vector<double> values(std::string_view name) const;
  // F32 tensors: golden results, which carry the rounding of float.
  std::vector<float> floats(std::string_view name) const;
  // I32 tensors.
  std::vector<int32_t> ints(std::string_view name) const;

 private:
  explicit Fixture(SafetensorsReader reader) : reader_(std::move(reader)) {}
  template <class T>
  std::vector<T> read(std::string_view name) const;

  SafetensorsReader reader_;
};

}  // namespace tapeline
