#include "runtime/json.h"

#include <bit>
#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "runtime/file.h"
#include "runtime/random.h"

namespace tapeline {
namespace {

Json parsed(std::string_view text) {
  absl::StatusOr<Json> value = parse_json(text, "t");
  EXPECT_TRUE(value.ok()) << value.status();
  return value.ok() ? *value : Json("unread");
}

TEST(Json, KeepsOrderUnknownKeysAndKinds) {
  const std::string text =
      R"({"model_type": "glm_moe_dsa", "z": 1, "a": [1, 2.0, null, true], )"
      R"("rope": {"theta": 1e+06, "eps": 1e-05}, "empty": {}, "list": []})";
  EXPECT_EQ(parsed(text).dump(), text);
}

TEST(Json, IndentsLikeAConfigFile) {
  EXPECT_EQ(parsed(R"({"a":[1,2],"b":{},"c":"x"})").dump(2),
            "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": {},\n  \"c\": "
            "\"x\"\n}");
}

TEST(Json, IntegersStayIntegersAndDoublesDoubles) {
  EXPECT_EQ(parsed("9223372036854775807").integer(), INT64_MAX);
  EXPECT_EQ(parsed("-9223372036854775808").integer(), INT64_MIN);
  EXPECT_TRUE(parsed("1.0").is_double());
  EXPECT_TRUE(parsed("1e3").is_double());
  EXPECT_EQ(parsed("1.0").dump(), "1.0");
  EXPECT_EQ(parsed("7").number(), 7.0);
  EXPECT_NE(Json(1), Json(1.0));
}

TEST(Json, DoublesRoundTrip) {
  const Random random(1, "doubles");
  for (uint64_t i = 0; i < 20000; ++i) {
    const double value = std::bit_cast<double>(random.bits64(i));
    if (!std::isfinite(value)) continue;
    const Json back = parsed(json_number(value));
    ASSERT_TRUE(back.is_double()) << json_number(value);
    ASSERT_EQ(std::bit_cast<uint64_t>(back.number()),
              std::bit_cast<uint64_t>(value));
  }
  EXPECT_EQ(json_number(0.1), "0.1");
  EXPECT_EQ(json_number(1e-5), "1e-05");
  EXPECT_EQ(json_number(-0.0), "-0.0");
}

TEST(Json, WhatJsonCannotSayIsNull) {
  EXPECT_EQ(Json(std::nan("")).dump(), "null");
  EXPECT_EQ(Json(std::numeric_limits<double>::infinity()).dump(), "null");
  EXPECT_EQ(Json(-std::numeric_limits<float>::infinity()).dump(), "null");
}

TEST(Json, EscapesStrings) {
  const std::string raw("\"\\\n\t\r\x01\x7f\xc3\xa4\xf0\x9f\x98\x80", 13);
  const std::string text = Json(raw).dump();
  EXPECT_EQ(text,
            "\"\\\"\\\\\\n\\t\\r\\u0001\\u007f\xc3\xa4\xf0\x9f\x98\x80\"");
  EXPECT_EQ(parsed(text).string(), raw);
  EXPECT_EQ(parsed(R"("\u00e4\ud83d\ude00")").string(),
            "\xc3\xa4\xf0\x9f\x98\x80");
}

TEST(Json, ReplacesBytesThatAreNotUtf8) {
  const std::string mark = "\xEF\xBF\xBD";
  EXPECT_EQ(Json("a\xff").dump(), "\"a" + mark + "\"");
  EXPECT_EQ(Json("\xc0\x80").dump(), "\"" + mark + mark + "\"");
  EXPECT_EQ(Json("\xed\xa0\x80").dump(), "\"" + mark + mark + mark + "\"");
  EXPECT_EQ(Json("\xe2\x82").dump(), "\"" + mark + mark + "\"");
}

TEST(Json, MembersAreFoundChangedAndErased) {
  Json value;
  value["b"] = 1;
  value["a"]["c"] = "x";
  value["b"] = 2;
  EXPECT_EQ(value.dump(), R"({"b": 2, "a": {"c": "x"}})");
  EXPECT_EQ(value.find("none"), nullptr);
  EXPECT_EQ(Json(3).find("a"), nullptr);
  EXPECT_TRUE(value.erase("b"));
  EXPECT_FALSE(value.erase("b"));
  EXPECT_EQ(value.dump(), R"({"a": {"c": "x"}})");
}

TEST(Json, FilesRoundTrip) {
  const std::string path = testing::TempDir() + "value.json";
  const Json value = parsed(R"({"x": [1, 0.5], "y": "z"})");
  ASSERT_TRUE(write_json(path, value).ok());
  EXPECT_EQ(*read_json(path), value);
  EXPECT_TRUE(read_file(path)->ends_with("}\n"));
}

struct Malformed {
  const char* text;
  const char* error;
};

TEST(Json, RefusesWithPosition) {
  const Malformed cases[] = {
      {"", "t:1:1: "},
      {"{", "t:1:2: "},
      {"{\n  \"a\": 1,\n  \"a\": 2\n}",
       "t:3:3: key 'a' appears twice; keep one"},
      {"{\"a\": {\"b\": 1}, \"b\": 1, \"a\": 1}", "t:1:25: key 'a' appears"},
      {"[1,\n 2,]", "t:2:4: "},
      {"[1] 2", "t:1:5: "},
      {"// x\n1", "t:1:1: "},
      {"NaN", "t:1:"},
      {"-Infinity", "t:1:"},
      {"1e400", "t:1:5: number overflow"},
      {"18446744073709551616", "t:1:20: integer does not fit 64 bits"},
      {"9223372036854775808", "t:1:19: integer does not fit 64 bits"},
      {"-9223372036854775809", "t:1:20: integer does not fit 64 bits"},
      {"01", "t:1:"},
      {"+1", "t:1:1: "},
      {"'a'", "t:1:1: "},
      {"\"a\n\"", "t:1:3: "},
      {"\"\\ud800\"", "t:1:"},
      {"\"\xc0\x80\"", "t:1:"},
      {"\"\xff\"", "t:1:"},
      {"\xef\xbb\xbf{}", "t:1:1: byte order mark"},
      {"{a: 1}", "t:1:2: "},
      {"{\"a\" 1}", "t:1:6: "},
      {"{\"a\": 1 \"b\": 2}", "t:1:"},
      {"tru", "t:1:"},
  };
  for (const Malformed& c : cases) {
    const absl::StatusOr<Json> value = parse_json(c.text, "t");
    ASSERT_FALSE(value.ok()) << c.text;
    EXPECT_TRUE(std::string(value.status().message()).starts_with(c.error))
        << c.text << " gave: " << value.status().message();
  }
}

TEST(Json, RefusesNulBytes) {
  for (std::string_view text :
       {std::string_view("{}\0", 3), std::string_view("\0", 1),
        std::string_view("\"\0\"", 3)}) {
    EXPECT_FALSE(parse_json(text, "t").ok());
  }
}

TEST(Json, LimitsDepth) {
  const auto nested = [](int n) {
    return std::string(static_cast<size_t>(n), '[') +
           std::string(static_cast<size_t>(n), ']');
  };
  EXPECT_TRUE(parse_json(nested(3), "t", 3).ok());
  EXPECT_EQ(std::string(parse_json(nested(4), "t", 3).status().message()),
            "t:1:4: nested deeper than 3 levels");
  EXPECT_FALSE(parse_json(nested(1'000'000), "t").ok());
  EXPECT_FALSE(parse_json("{\"a\":{\"b\":{}}}", "t", 2).ok());
  EXPECT_TRUE(parse_json("[{},{},[],[]]", "t", 2).ok());
}

TEST(Json, PositionsCountLinesAndColumnsFromOne) {
  EXPECT_EQ(text_position("ab\ncd", 0, "f"), "f:1:1: ");
  EXPECT_EQ(text_position("ab\ncd", 2, "f"), "f:1:3: ");
  EXPECT_EQ(text_position("ab\ncd", 4, "f"), "f:2:2: ");
}

TEST(JsonDeathTest, WrongKindSaysBoth) {
  EXPECT_DEATH(Json("x").integer(), "string used as integer");
  EXPECT_DEATH(Json(1).object(), "integer used as object");
  EXPECT_DEATH(Json(UINT64_MAX), "above the range of int64");
}

}  // namespace
}  // namespace tapeline
