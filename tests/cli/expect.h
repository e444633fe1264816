// What tests of the binary expect of its output.
#pragma once

#include <string>
#include <vector>

#include "runtime/json.h"
#include "tests/cli/child.h"

namespace tapeline {

using Words = std::vector<std::string>;
Words operator+(Words a, const Words& b);

// The code, and one line on stderr, "tapeline: ...", with each of the parts.
void expect_failure(const ChildResult& r, int code, const Words& parts);

// Text that must be JSON.
Json json_of(const std::string& text);
std::vector<std::string> keys(const Json& json);
// A .jsonl file.
std::vector<Json> lines_of(const std::string& path);

}  // namespace tapeline
