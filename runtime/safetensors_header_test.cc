#include "runtime/safetensors_header.h"

#include "gtest/gtest.h"

namespace tapeline {
namespace {

std::string le64(uint64_t n) {
  std::string out(8, '\0');
  for (int i = 0; i < 8; ++i) out[i] = static_cast<char>(n >> (8 * i));
  return out;
}
std::string file_of(const std::string& header, size_t data_bytes) {
  return le64(header.size()) + header + std::string(data_bytes, 'd');
}

// One F32[1] at [begin, end).
std::string one(const std::string& name, int begin, int end) {
  return "\"" + name + "\":{\"dtype\":\"F32\",\"shape\":[" +
         std::to_string((end - begin) / 4) + "],\"data_offsets\":[" +
         std::to_string(begin) + "," + std::to_string(end) + "]}";
}
std::string with(const std::string& dtype, const std::string& shape,
                 const std::string& offsets) {
  return "{\"a\":{\"dtype\":" + dtype + ",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}}";
}

// What a reader does with the bytes of a whole file.
absl::StatusOr<SafetensorsHeader> parse(std::string_view bytes) {
  const auto length =
      safetensors_header_bytes(bytes.substr(0, 8), bytes.size(), "f");
  if (!length.ok()) return length.status();
  return parse_safetensors_header(bytes.substr(8, *length), bytes.size(), "f");
}

struct Malformed {
  const char* what;
  std::string bytes;
  const char* error;  // part of the message
};

std::vector<Malformed> malformed_files() {
  const std::string max = "9223372036854775807";
  const std::string f32 = "\"F32\"";
  std::vector<Malformed> cases = {
      // The length and the file's size.
      {"empty file", "", "0 bytes are too few"},
      {"seven bytes", std::string(7, '\0'), "7 bytes are too few"},
      {"length zero", le64(0), "does not begin with '{'"},
      {"length past the end", le64(100) + "{}", "header of 100 bytes"},
      {"length one past the end", le64(3) + "{}", "header of 3 bytes"},
      {"length that wraps", le64(UINT64_MAX) + "{}", "header of 18446744"},
      {"length that wraps with 8", le64(UINT64_MAX - 7) + "{}", "header of"},
      {"length negative as int64", le64(uint64_t{1} << 63) + "{}", "header of"},
      {"length over 100 MB", le64(100'000'001) + "{}", "header of 100000001"},
      // The text of the header.
      {"text before the brace", file_of(" {}", 0), "does not begin with '{'"},
      {"array", file_of("[]", 0), "does not begin with '{'"},
      {"byte order mark", file_of("\xef\xbb\xbf{}", 0), "does not begin"},
      {"unclosed", file_of("{", 0), "header:1:2: "},
      {"two values", file_of("{}{}", 0), "header:1:3: "},
      {"NUL padding", file_of(std::string("{}\0\0", 4), 0), "NUL byte"},
      {"text after a NUL", file_of(std::string("{}\0x", 4), 0), "NUL byte"},
      {"not UTF-8", file_of("{" + one("a\xff", 0, 4) + "}", 4), "header:1:"},
      {"overlong UTF-8", file_of("{" + one("\xc0\x80", 0, 4) + "}", 4),
       "header:1:"},
      {"lone surrogate", file_of("{" + one("\\ud800", 0, 4) + "}", 4),
       "header:1:"},
      {"trailing comma", file_of("{" + one("a", 0, 4) + ",}", 4), "header:1:"},
      {"comment", file_of("{/* x */}", 0), "header:1:2"},
      {"nested shape", file_of(with(f32, "[[1]]", "[0,4]"), 4),
       "nested deeper than 3"},
      {"a million brackets",
       file_of("{\"a\":" + std::string(1'000'000, '['), 0), "header:1:"},
      // Keys.
      {"same tensor twice",
       file_of("{" + one("a", 0, 4) + "," + one("a", 4, 8) + "}", 8),
       "key 'a' appears twice"},
      {"same tensor twice by escape",
       file_of("{" + one("a", 0, 4) + "," + one("\\u0061", 4, 8) + "}", 8),
       "key 'a' appears twice"},
      {"same field twice",
       file_of("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],"
               "\"data_offsets\":[0,4]}}",
               4),
       "key 'dtype' appears twice"},
      {"metadata twice",
       file_of("{\"__metadata__\":{},\"__metadata__\":{}}", 0),
       "key '__metadata__' appears twice"},
      {"unknown field",
       file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]"
               ",\"scale\":[0,4]}}",
               4),
       "unknown field 'scale' of tensor 'a'"},
      {"no dtype", file_of("{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4),
       "tensor 'a' needs dtype"},
      {"no shape",
       file_of("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4),
       "tensor 'a' needs dtype"},
      {"no offsets", file_of("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 0),
       "tensor 'a' needs dtype"},
      {"empty tensor object", file_of("{\"a\":{}}", 0), "tensor 'a' needs"},
      // Kinds of values.
      {"tensor is an array", file_of("{\"a\":[]}", 0), "an array where"},
      {"tensor is a string", file_of("{\"a\":\"F32\"}", 0), "a string where"},
      {"tensor is null", file_of("{\"a\":null}", 0), "null where"},
      {"metadata of integers", file_of("{\"__metadata__\":{\"a\":1}}", 0),
       "an integer where __metadata__"},
      {"metadata of objects", file_of("{\"__metadata__\":{\"a\":{}}}", 0),
       "an object where __metadata__"},
      {"metadata of null", file_of("{\"__metadata__\":{\"a\":null}}", 0),
       "null where __metadata__"},
      {"metadata is a string", file_of("{\"__metadata__\":\"pt\"}", 0),
       "a string where __metadata__"},
      {"shape is a number", file_of(with(f32, "1", "[0,4]"), 4),
       "an integer where"},
      {"offsets are an object", file_of(with(f32, "[1]", "{}"), 4),
       "an object where"},
      {"dtype is a number", file_of(with("32", "[1]", "[0,4]"), 4),
       "an integer where"},
      {"boolean extent", file_of(with(f32, "[true]", "[0,4]"), 4),
       "a boolean where"},
      {"string extent", file_of(with(f32, "[\"1\"]", "[0,4]"), 4),
       "a string where"},
      // Numbers.
      {"fractional extent", file_of(with(f32, "[1.5]", "[0,4]"), 4),
       "a number with '.'"},
      {"extent written 1.0", file_of(with(f32, "[1.0]", "[0,4]"), 4),
       "a number with '.'"},
      {"offset written 4e0", file_of(with(f32, "[1]", "[0,4e0]"), 4),
       "a number with '.'"},
      {"negative extent", file_of(with(f32, "[-1]", "[0,4]"), 4),
       "negative number in tensor 'a'"},
      {"two negative extents", file_of(with(f32, "[-1,-1]", "[0,4]"), 4),
       "negative number"},
      {"negative offset", file_of(with(f32, "[1]", "[-4,0]"), 4),
       "negative number"},
      {"extent 2^64", file_of(with(f32, "[18446744073709551616]", "[0,4]"), 4),
       "does not fit 64 bits"},
      {"extent 2^63", file_of(with(f32, "[9223372036854775808]", "[0,4]"), 4),
       "does not fit 64 bits"},
      {"extent 1e400", file_of(with(f32, "[1e400]", "[0,4]"), 4), "header:1:"},
      {"shape product wraps to 4 bytes",
       file_of(with(f32, "[4611686018427387905,4]", "[0,4]"), 4), "overflows"},
      {"product wraps to zero",
       file_of(with(f32, "[4294967296,4294967296]", "[0,0]"), 0), "overflows"},
      {"bits overflow", file_of(with(f32, "[" + max + "]", "[0,4]"), 4),
       "overflows"},
      {"zero hides an overflow",
       file_of(with(f32, "[0," + max + "," + max + "]", "[0,0]"), 0),
       "overflows"},
      // dtype.
      {"unknown dtype", file_of(with("\"F31\"", "[1]", "[0,4]"), 4),
       "unknown dtype 'F31' of tensor 'a'"},
      {"lower-case dtype", file_of(with("\"f32\"", "[1]", "[0,4]"), 4),
       "unknown dtype 'f32'"},
      {"empty dtype", file_of(with("\"\"", "[1]", "[0,4]"), 4),
       "unknown dtype ''"},
      {"half a byte", file_of(with("\"F4\"", "[3]", "[0,2]"), 2),
       "not a whole byte"},
      {"six bits", file_of(with("\"F6_E2M3\"", "[2]", "[0,2]"), 2),
       "not a whole byte"},
      // Offsets.
      {"no offset", file_of(with(f32, "[1]", "[]"), 4), "needs two values"},
      {"one offset", file_of(with(f32, "[1]", "[0]"), 4), "needs two values"},
      {"three offsets", file_of(with(f32, "[1]", "[0,4,4]"), 4),
       "more than two values"},
      {"inverted", file_of(with(f32, "[1]", "[4,0]"), 4),
       "end before they begin"},
      {"too few bytes", file_of(with(f32, "[2]", "[0,4]"), 4),
       "has 4 bytes, its dtype and shape need 8"},
      {"too many bytes", file_of(with(f32, "[1]", "[0,8]"), 8),
       "has 8 bytes, its dtype and shape need 4"},
      {"scalar of no bytes", file_of(with(f32, "[]", "[0,0]"), 0),
       "has 0 bytes, its dtype and shape need 4"},
      {"offsets near 2^63",
       file_of(with(f32, "[1]", "[9223372036854775803," + max + "]"), 4),
       "(hole)"},
      // Tiling.
      {"hole at the front", file_of("{" + one("a", 4, 8) + "}", 8), "(hole)"},
      {"hole between",
       file_of("{" + one("a", 0, 4) + "," + one("b", 8, 12) + "}", 12),
       "tensor 'b' begins at byte 8 of the data, the one before ends at 4"},
      {"overlap",
       file_of("{" + one("a", 0, 8) + "," + one("b", 4, 12) + "}", 12),
       "(overlap)"},
      {"same bytes twice",
       file_of("{" + one("a", 0, 4) + "," + one("b", 0, 4) + "}", 4),
       "(overlap)"},
      {"cut data", file_of("{" + one("a", 0, 8) + "}", 7),
       "the tensors have 8 bytes, the file has 7"},
      {"rest after the data", file_of("{" + one("a", 0, 8) + "}", 9),
       "the tensors have 8 bytes, the file has 9"},
      {"data without tensors", file_of("{}", 1), "the tensors have 0 bytes"},
  };
  return cases;
}

TEST(SafetensorsHeader, RefusesEveryMalformedFile) {
  const std::vector<Malformed> cases = malformed_files();
  EXPECT_GE(cases.size(), 75u);
  for (const Malformed& c : cases) {
    const absl::Status status = parse(c.bytes).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.what;
    const std::string message(status.message());
    EXPECT_NE(message.find(c.error), std::string::npos)
        << c.what << ": " << message;
    EXPECT_TRUE(message.starts_with("f")) << message;
  }
}

TEST(SafetensorsHeader, AcceptsWhatTheFormatAllows) {
  const std::string valid[] = {
      file_of("{}", 0),
      file_of("{}      ", 0),
      file_of("{\"__metadata__\":null}", 0),
      file_of("{\"__metadata__\":{}," + one("a", 0, 4) + "}", 4),
      // Tensors of no bytes may begin where others do.
      file_of("{" + one("a", 0, 0) + "," + one("b", 0, 4) + "," +
                  one("c", 4, 4) + "}",
              4),
      // Not in order of offset.
      file_of("{" + one("a", 4, 8) + "," + one("b", 0, 4) + "}", 8),
      file_of(with("\"F4\"", "[4]", "[0,2]"), 2),
      file_of(with("\"C64\"", "[2,0]", "[0,0]"), 0),
      file_of(with("\"F8_E4M3\"", "[1,1,1,1,1,1]", "[0,1]"), 1),
      file_of("{ \"\" : { \"shape\" : [ ] , \"data_offsets\" : [ 0 , 1 ] , "
              "\"dtype\" : \"BOOL\" } }\n",
              1),
  };
  for (const std::string& bytes : valid) {
    EXPECT_TRUE(parse(bytes).ok()) << parse(bytes).status() << "\n"
                                   << bytes.substr(8);
  }
}

TEST(SafetensorsHeader, SaysWhereTheBytesAre) {
  const std::string bytes =
      file_of("{\"__metadata__\":{\"k\":\"v\"}," + one("b", 8, 12) + "," +
                  one("a", 0, 8) + "}",
              12);
  const auto header = parse(bytes);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->metadata.at("k"), "v");
  ASSERT_EQ(header->tensors.size(), 2u);
  const TensorInfo& a = header->tensors[0];
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(a.dtype, "F32");
  EXPECT_EQ(a.shape, std::vector<int64_t>{2});
  EXPECT_EQ(a.offset, bytes.size() - 12);
  EXPECT_EQ(a.bytes, 8u);
  EXPECT_EQ(header->tensors[1].offset, bytes.size() - 4);
}

TEST(SafetensorsHeader, AnyCutIsRefused) {
  const std::string bytes =
      file_of("{" + one("a", 0, 8) + "," + one("b", 8, 24) + "}", 24);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(parse(bytes.substr(0, size)).ok()) << size;
  }
  EXPECT_TRUE(parse(bytes).ok());
}

TEST(SafetensorsTypes, AreThoseOfTheFormat) {
  for (DType dtype : {DType::kF32, DType::kBf16, DType::kF64, DType::kI32,
                      DType::kI64, DType::kU8}) {
    const std::string_view name = to_safetensors(dtype);
    EXPECT_EQ(dtype_from_safetensors(name), dtype);
    EXPECT_EQ(safetensors_bits(name), static_cast<int>(8 * size_of(dtype)));
  }
  EXPECT_EQ(dtype_from_safetensors("F16"), std::nullopt);
  EXPECT_EQ(safetensors_bits("F16"), 16);
  EXPECT_EQ(safetensors_bits("F128"), std::nullopt);
}

}  // namespace
}  // namespace tapeline
