#include "runtime/hash.h"

#include <string>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

std::string hex(const std::string& text) {
  return to_hex(hash_bytes(text.data(), text.size()));
}

// Expected values are what the command `xxh128sum` prints.
TEST(Hash, AgreesWithTheCommandLineTool) {
  EXPECT_EQ(hex(""), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(hex("tapeline"), "46ebeaee01be05f3aba1d35d3b65e8a9");
  EXPECT_EQ(hex(std::string(1000, 'a')), "b01da365eddaa29cb3e7af627147db7c");
}

TEST(Hash, PiecesEqualTheWhole) {
  const std::string text(5000, 'q');
  Hasher hasher;
  size_t at = 0;
  for (size_t piece : {1u, 0u, 999u, 2500u, 1500u}) {
    hasher.update(text.data() + at, piece);
    at += piece;
  }
  ASSERT_EQ(at, text.size());
  EXPECT_EQ(to_hex(hasher.digest()), hex(text));
}

TEST(Hash, OneBitChangesIt) {
  std::string text(300, 'x');
  const std::string before = hex(text);
  text[150] ^= 1;
  EXPECT_NE(hex(text), before);
}

}  // namespace
}  // namespace tapeline
