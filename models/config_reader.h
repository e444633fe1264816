// Typed reading of a Hugging Face config.json: absent and null keys take the
// default, wrong types and ranges are errors that name key and value.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "autograd/op_types.h"
#include "runtime/json.h"

namespace tapeline {

// Keys that some family here reads or that Hugging Face files of these families
// carry. A file may hold others, which are kept; a configuration written by
// hand may not: the nearest known key is named.
absl::Status check_known_keys(const Json& json);

class ConfigReader {
 public:
  explicit ConfigReader(const Json& json) : json_(json) {}

  // least <= value <= most; kMostSize keeps products of two sizes and a count
  // within int64_t.
  static constexpr int64_t kMostSize = int64_t{1} << 24;
  absl::StatusOr<int64_t> integer(const char* key, int64_t fallback,
                                  int64_t least,
                                  int64_t most = kMostSize) const;
  // One number under several names; different values are a contradiction.
  absl::StatusOr<int64_t> aliased(std::initializer_list<const char*> keys,
                                  int64_t fallback, int64_t least,
                                  int64_t most) const;
  // Finite.
  absl::StatusOr<double> number(const char* key, double fallback) const;
  // Finite and above zero.
  absl::StatusOr<double> positive(const char* key, double fallback) const;
  absl::StatusOr<bool> boolean(const char* key, bool fallback) const;
  absl::StatusOr<std::string> string(const char* key,
                                     const std::string& fallback) const;
  absl::StatusOr<std::vector<std::string>> strings(const char* key) const;
  // A number or a list of numbers.
  absl::StatusOr<std::vector<int64_t>> integers(const char* key) const;
  // rope_parameters, or rope_theta and rope_scaling at top level.
  absl::StatusOr<RopeConfig> rope(int64_t dim) const;
  // Features this project does not have.
  absl::Status refuse_true(std::initializer_list<const char*> keys) const;
  absl::Status error(const std::string& what) const;

 private:
  const Json* find(const char* key) const;
  const Json& json_;
};

}  // namespace tapeline
