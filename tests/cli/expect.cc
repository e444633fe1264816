#include "tests/cli/expect.h"

#include <algorithm>

#include "gtest/gtest.h"
#include "runtime/file.h"

namespace tapeline {

void expect_failure(const ChildResult& r, int code, const Words& parts) {
  EXPECT_EQ(r.code, code) << r.err << " signal " << r.signal;
  EXPECT_TRUE(r.err.starts_with("tapeline: ")) << r.err;
  EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << r.err;
  for (const std::string& part : parts) {
    EXPECT_NE(r.err.find(part), std::string::npos)
        << "no '" << part << "' in: " << r.err;
  }
}

Words operator+(Words a, const Words& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Json json_of(const std::string& text) {
  absl::StatusOr<Json> json = parse_json(text, "stdout");
  EXPECT_TRUE(json.ok()) << json.status() << text;
  return json.ok() ? *json : Json();
}

std::vector<std::string> keys(const Json& json) {
  std::vector<std::string> out;
  for (const auto& [key, value] : json.object()) out.push_back(key);
  return out;
}

std::vector<Json> lines_of(const std::string& path) {
  std::vector<Json> out;
  std::string text = read_file(path).value();
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    out.push_back(json_of(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return out;
}

}  // namespace tapeline
