#include "runtime/safetensors.h"

#include <unistd.h>

#include <fstream>

#include "gtest/gtest.h"
#include "runtime/access.h"

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

class SafetensorsTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "safetensors_" +
              testing::UnitTest::GetInstance()->current_test_info()->name();
    ASSERT_TRUE(remove_path(folder_).ok());
    ASSERT_TRUE(make_directories(folder_).ok());
  }
  std::string path(const std::string& name) const {
    return join_path(folder_, name);
  }
  // Without fsync: hundreds of these files are written and read once.
  void put(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
  }
  std::string folder_;
};

// One F32[1] at [begin, end).
std::string one(const std::string& name, int begin, int end) {
  return "\"" + name + "\":{\"dtype\":\"F32\",\"shape\":[" +
         std::to_string((end - begin) / 4) + "],\"data_offsets\":[" +
         std::to_string(begin) + "," + std::to_string(end) + "]}";
}
// Tensors with recognisable bytes.
struct Items {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<NamedBytes> tensors;

  void add(const std::string& name, DType dtype, const Shape& shape) {
    const size_t n = static_cast<size_t>(shape.elements()) * size_of(dtype);
    std::vector<std::byte>& data = bytes.emplace_back(n);
    for (size_t i = 0; i < n; ++i) {
      data[i] = static_cast<std::byte>(i * 7 + bytes.size());
    }
    tensors.push_back({name, dtype, shape, nullptr});
    for (size_t i = 0; i < tensors.size(); ++i) {
      tensors[i].data = bytes[i].data();
    }
  }
};

Items mixed_items() {
  Items items;
  items.add("z.u8", DType::kU8, {3});
  items.add("b.bf16", DType::kBf16, {2, 3});
  items.add("a.f32", DType::kF32, {1, 2, 3, 1});
  items.add("d.i64", DType::kI64, {2});
  items.add("e.f64", DType::kF64, {});
  items.add("c.i32", DType::kI32, {0, 5});
  items.add("\"quoted\"\n\xc3\xa4", DType::kI32, {1});
  return items;
}

void expect_holds(const SafetensorsReader& reader, const Items& items) {
  ASSERT_EQ(reader.tensors().size(), items.tensors.size());
  for (size_t i = 0; i < items.tensors.size(); ++i) {
    const NamedBytes& wanted = items.tensors[i];
    const TensorInfo* info = reader.find(wanted.name);
    ASSERT_NE(info, nullptr) << wanted.name;
    EXPECT_EQ(info->dtype, to_safetensors(wanted.dtype));
    EXPECT_EQ(info->shape,
              std::vector<int64_t>(wanted.shape.begin(), wanted.shape.end()));
    EXPECT_EQ(info->offset % size_of(wanted.dtype), 0u) << wanted.name;
    std::vector<std::byte> got(info->bytes, std::byte{0xEE});
    ASSERT_TRUE(reader.read(wanted.name, got.data(), got.size()).ok());
    EXPECT_EQ(got, items.bytes[i]) << wanted.name;
  }
}

TEST_F(SafetensorsTest, RoundTripsEveryType) {
  const Items items = mixed_items();
  ASSERT_TRUE(
      write_safetensors(path("x.safetensors"), items.tensors, {{"step", "12"}})
          .ok());
  const auto reader = SafetensorsReader::open(path("x.safetensors"));
  ASSERT_TRUE(reader.ok()) << reader.status();
  expect_holds(*reader, items);
  EXPECT_EQ(reader->metadata(), (std::map<std::string, std::string>{
                                    {"format", "pt"}, {"step", "12"}}));
  EXPECT_EQ(reader->total_bytes(), 3u + 12 + 24 + 16 + 8 + 0 + 4);
  EXPECT_EQ(list_directory(folder_)->size(), 1u);
}

TEST_F(SafetensorsTest, WritesTheSameBytesForTheSameTensors) {
  const Items items = mixed_items();
  ASSERT_TRUE(write_safetensors(path("a"), items.tensors).ok());
  std::vector<NamedBytes> reversed(items.tensors.rbegin(),
                                   items.tensors.rend());
  ASSERT_TRUE(write_safetensors(path("b"), reversed).ok());
  EXPECT_EQ(*read_file(path("a")), *read_file(path("b")));
}

TEST_F(SafetensorsTest, ReadsTensors) {
  const std::vector<float> x = {1, -2, 3.5, 4, 5, 6};
  const std::vector<bf16> y = {bf16(1.5f), bf16(-8)};
  const std::vector<int64_t> z = {int64_t{1} << 40};
  const auto bytes = [](const auto& v) {
    return reinterpret_cast<const std::byte*>(v.data());
  };
  const std::vector<NamedBytes> tensors = {
      {"x", DType::kF32, {2, 3}, bytes(x)},
      {"y", DType::kBf16, {2}, bytes(y)},
      {"z", DType::kI64, {}, bytes(z)},
      {"none", DType::kF32, {4, 0}, nullptr},
  };
  ASSERT_TRUE(write_safetensors(path("x.safetensors"), tensors).ok());
  const auto reader = SafetensorsReader::open(path("x.safetensors"));
  ASSERT_TRUE(reader.ok());
  const auto read_x = reader->read_tensor("x", Tag::kParameter);
  ASSERT_TRUE(read_x.ok()) << read_x.status();
  EXPECT_EQ(read_x->shape(), (Shape{2, 3}));
  EXPECT_EQ(read_x->to_vector<float>(), x);
  EXPECT_EQ(read_x->storage()->tag(), Tag::kParameter);
  EXPECT_EQ(static_cast<float>(reader->read_tensor("y")->to_vector<bf16>()[1]),
            -8.0f);
  EXPECT_EQ(reader->read_tensor("z")->to_vector<int64_t>(), z);
  EXPECT_EQ(reader->read_tensor("none")->shape(), (Shape{4, 0}));
}

TEST_F(SafetensorsTest, SaysWhatItCannotReadAsATensor) {
  put("x.safetensors",
      file_of("{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,4]},"
              "\"b\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1],"
              "\"data_offsets\":[4,5]}}",
              5));
  const auto reader = SafetensorsReader::open(path("x.safetensors"));
  ASSERT_TRUE(reader.ok());
  const std::string file = path("x.safetensors");
  EXPECT_EQ(std::string(reader->read_tensor("a").status().message()),
            file +
                ": tensor 'a' is F16[2]; readable are F32, BF16, F64, I32, "
                "I64 and U8");
  EXPECT_EQ(std::string(reader->read_tensor("b").status().message()),
            file +
                ": tensor 'b' is U8[1, 1, 1, 1, 1]; tensors have at most 4 "
                "dimensions");
  EXPECT_EQ(std::string(reader->read_tensor("B").status().message()),
            file + ": no tensor 'B'; did you mean 'a'?");
  std::byte out[8];
  EXPECT_FALSE(reader->read("a", out, 3).ok());
  EXPECT_FALSE(reader->read("a", out, 5).ok());
  EXPECT_TRUE(reader->read_range("a", 1, out, 3).ok());
  EXPECT_FALSE(reader->read_range("a", 2, out, 3).ok());
  EXPECT_FALSE(reader->read_range("a", UINT64_MAX, out, 2).ok());
}

TEST_F(SafetensorsTest, AFileThatShrinksAfterOpeningIsDataLoss) {
  const Items items = mixed_items();
  ASSERT_TRUE(write_safetensors(path("x.safetensors"), items.tensors).ok());
  const auto reader = SafetensorsReader::open(path("x.safetensors"));
  ASSERT_TRUE(reader.ok());
  ASSERT_EQ(truncate(path("x.safetensors").c_str(), 40), 0);
  std::vector<std::byte> out(16);
  EXPECT_EQ(reader->read("d.i64", out.data(), out.size()).code(),
            absl::StatusCode::kDataLoss);
}

TEST_F(SafetensorsTest, ShardsRoundTrip) {
  const Items items = mixed_items();
  ASSERT_TRUE(write_safetensors_shards(folder_, items.tensors, 24).ok());
  EXPECT_EQ(*list_directory(folder_),
            (std::vector<std::string>{"model-00001-of-00004.safetensors",
                                      "model-00002-of-00004.safetensors",
                                      "model-00003-of-00004.safetensors",
                                      "model-00004-of-00004.safetensors",
                                      "model.safetensors.index.json"}));
  const auto reader = SafetensorsReader::open(folder_);
  ASSERT_TRUE(reader.ok()) << reader.status();
  expect_holds(*reader, items);
  EXPECT_EQ(reader->metadata().at("format"), "pt");
  const auto index =
      SafetensorsReader::open(path("model.safetensors.index.json"));
  ASSERT_TRUE(index.ok());
  expect_holds(*index, items);
  // Shards hold at most 24 bytes: u8 3 + bf16 12 | f32 24 | i64 16 + f64 8 +
  // i32 0 | i32 4.
  EXPECT_EQ(reader->file(*reader->find("e.f64")),
            path("model-00003-of-00004.safetensors"));
}

TEST_F(SafetensorsTest, OneShardIsASingleFile) {
  const Items items = mixed_items();
  ASSERT_TRUE(
      write_safetensors_shards(path("out/hf"), items.tensors, 1000).ok());
  EXPECT_EQ(*list_directory(path("out/hf")),
            std::vector<std::string>{"model.safetensors"});
  const auto reader = SafetensorsReader::open(path("out/hf"));
  ASSERT_TRUE(reader.ok());
  expect_holds(*reader, items);
}

TEST_F(SafetensorsTest, AnExportIsNotMixedWithAnother) {
  const Items items = mixed_items();
  ASSERT_TRUE(write_safetensors_shards(folder_, items.tensors, 24).ok());
  EXPECT_TRUE(write_safetensors_shards(folder_, items.tensors, 24).ok());
  const absl::Status status =
      write_safetensors_shards(folder_, items.tensors, 1000);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(SafetensorsReader::open(folder_).ok());
  put("model.safetensors", "x");
  EXPECT_NE(std::string(SafetensorsReader::open(folder_).status().message())
                .find("holds both"),
            std::string::npos);
}

TEST_F(SafetensorsTest, RefusesIndexesThatDoNotMatchTheirShards) {
  put("s1.safetensors", file_of("{" + one("a", 0, 4) + "}", 4));
  put("s2.safetensors", file_of("{" + one("b", 0, 8) + "}", 8));
  put("again.safetensors", file_of("{" + one("a", 0, 4) + "}", 4));
  const std::string both =
      "\"weight_map\":{\"a\":\"s1.safetensors\",\"b\":\"s2.safetensors\"}";
  const struct {
    const char* what;
    std::string text;
    const char* error;  // null: fine
  } cases[] = {
      {"no metadata", "{" + both + "}", nullptr},
      {"empty metadata", "{\"metadata\":{}," + both + "}", nullptr},
      {"right size", "{\"metadata\":{\"total_size\":12}," + both + "}",
       nullptr},
      {"wrong size", "{\"metadata\":{\"total_size\":13}," + both + "}",
       "total_size is 13, the shards hold 12 bytes"},
      {"size of text", "{\"metadata\":{\"total_size\":\"12\"}," + both + "}",
       "total_size is not a size"},
      {"fractional size", "{\"metadata\":{\"total_size\":12.0}," + both + "}",
       "total_size is not a size"},
      {"negative size", "{\"metadata\":{\"total_size\":-12}," + both + "}",
       "total_size is not a size"},
      {"not an object", "[]", "needs an object weight_map"},
      {"no weight_map", "{\"metadata\":{}}", "needs an object weight_map"},
      {"weight_map is a list", "{\"weight_map\":[]}",
       "needs an object weight_map"},
      {"number for a file", "{\"weight_map\":{\"a\":1}}", "is not a file name"},
      {"weight twice",
       "{\"weight_map\":{\"a\":\"s1.safetensors\",\"a\":\"s1.safetensors\"}}",
       "key 'a' appears twice"},
      {"missing shard", "{\"weight_map\":{\"a\":\"none.safetensors\"}}",
       "none.safetensors: open failed"},
      {"missing tensor",
       "{\"weight_map\":{\"a\":\"s1.safetensors\",\"c\":\"s1.safetensors\"}}",
       "s1.safetensors lacks tensor 'c'"},
      {"tensor in another shard",
       "{\"weight_map\":{\"b\":\"s1.safetensors\",\"a\":\"s2.safetensors\"}}",
       "s1.safetensors holds tensor 'a', which the index gives to s2"},
      {"tensor unknown to the index",
       "{\"weight_map\":{\"a\":\"s1.safetensors\",\"c\":\"s2.safetensors\"}}",
       "s2.safetensors holds tensor 'b', which the index does not know"},
      {"tensor in two shards",
       "{\"weight_map\":{\"a\":\"s1.safetensors\","
       "\"x\":\"again.safetensors\"}}",
       "which the index gives to"},
      {"parent folder",
       "{\"weight_map\":{\"a\":\"../index_test/s1.safetensors\"}}",
       "is not the name of a .safetensors file"},
      {"absolute", "{\"weight_map\":{\"a\":\"/etc/s1.safetensors\"}}",
       "is not the name of a .safetensors file"},
      {"inner folder", "{\"weight_map\":{\"a\":\"x/s1.safetensors\"}}",
       "is not the name of a .safetensors file"},
      {"dots", "{\"weight_map\":{\"a\":\"..\"}}",
       "is not the name of a .safetensors file"},
      {"NUL", "{\"weight_map\":{\"a\":\"s1\\u0000.safetensors\"}}",
       "is not the name of a .safetensors file"},
      {"another suffix", "{\"weight_map\":{\"a\":\"s1.bin\"}}",
       "is not the name of a .safetensors file"},
      {"empty name", "{\"weight_map\":{\"a\":\"\"}}",
       "is not the name of a .safetensors file"},
  };
  for (const auto& c : cases) {
    put("model.safetensors.index.json", c.text);
    const absl::Status status = SafetensorsReader::open(folder_).status();
    if (c.error == nullptr) {
      EXPECT_TRUE(status.ok()) << c.what << ": " << status;
    } else {
      EXPECT_NE(std::string(status.message()).find(c.error), std::string::npos)
          << c.what << ": " << status;
    }
  }
}

TEST_F(SafetensorsTest, AFolderWithoutWeightsIsNotFound) {
  EXPECT_EQ(SafetensorsReader::open(folder_).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(SafetensorsReader::open(path("none")).status().code(),
            absl::StatusCode::kNotFound);
}

TEST(SafetensorsDeathTest, WritingOneNameTwiceDies) {
  Items items;
  items.add("w", DType::kU8, {1});
  items.add("w", DType::kU8, {1});
  EXPECT_DEATH((void)write_safetensors(testing::TempDir() + "x", items.tensors),
               "two tensors are named 'w'");
}

}  // namespace
}  // namespace tapeline
