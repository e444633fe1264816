#include "runtime/utf8.h"

#include "gtest/gtest.h"

namespace tapeline {
namespace {

TEST(Utf8, EveryCharacterRoundTrips) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    utf8_append(text, c);
    const size_t length = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    // One assertion per character: a million of them.
    const bool same = text.size() == length && utf8_length(text, 0) == length &&
                      utf8_decode(text, 0) == c;
    const std::string_view cut(text.data(), length - 1);
    ASSERT_TRUE(same && utf8_length(cut, 0) == 0) << static_cast<uint32_t>(c);
  }
}

TEST(Utf8, ExactlyTheShortestFormsAreAccepted) {
  // All two-byte and, with fixed tails, all longer beginnings: as many as there
  // are characters of that length.
  int two = 0, three = 0, four = 0;
  for (int a = 0; a < 256; ++a) {
    for (int b = 0; b < 256; ++b) {
      std::string text = {static_cast<char>(a), static_cast<char>(b)};
      if (utf8_length(text, 0) == 2) ++two;
      text += "\x80";
      if (utf8_length(text, 0) == 3) ++three;
      text += "\x80";
      if (utf8_length(text, 0) == 4) ++four;
    }
  }
  EXPECT_EQ(two, 0x800 - 0x80);
  EXPECT_EQ(three, (0x10000 - 0x800 - 0x800) / 64);
  EXPECT_EQ(four, (0x110000 - 0x10000) / 4096);
}

TEST(Utf8, ErrorIsTheFirstBadByte) {
  EXPECT_EQ(utf8_error("a\xc3\xa4z"), std::string_view::npos);
  EXPECT_EQ(utf8_error(""), std::string_view::npos);
  EXPECT_EQ(utf8_error("a\xc3\xa4\xff"), 3u);
  EXPECT_EQ(utf8_error("a\xc3"), 1u);
  EXPECT_EQ(utf8_error("\xed\xa0\x80"), 0u);
  EXPECT_EQ(utf8_length("a", 1), 0u);
}

}  // namespace
}  // namespace tapeline
