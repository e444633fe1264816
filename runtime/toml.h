// TOML files as a flat list of values, each with the place it was written.
//
// A value's key is its path: [a.b] with c = 1 is {"a", "b", "c"}. Tables and
// their keys come in the order of the file. A header of an empty table comes as
// an entry without value, so that a misspelt one can be refused. Arrays and the
// inline tables inside them are Json values. Dates and times are refused: no
// setting of ours is one.
// Errors read "name:line:column: what". Text above 1 MiB, values nested beyond
// 12 levels and keys of more than 16 parts are refused.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/json.h"

namespace tapeline {

struct TomlEntry {
  std::vector<std::string> path;
  Json value;
  bool table = false;        // an empty table: value is null
  int line = 0, column = 0;  // of the last part of the key, from 1
};

// `name` stands for the text in errors.
absl::StatusOr<std::vector<TomlEntry>> parse_toml(std::string_view text,
                                                  std::string_view name);
absl::StatusOr<std::vector<TomlEntry>> read_toml(const std::string& path);

// A value as TOML on one line; null, which TOML lacks, is a CHECK.
std::string toml_value(const Json& value);
// A path as a dotted key, its parts quoted where TOML wants it.
std::string toml_key(const std::vector<std::string>& path);

}  // namespace tapeline
