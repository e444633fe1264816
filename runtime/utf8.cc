#include "runtime/utf8.h"

namespace tapeline {

size_t utf8_length(std::string_view text, size_t i) {
  const auto byte = [&](size_t k) {
    return i + k < text.size() ? static_cast<unsigned char>(text[i + k]) : 0u;
  };
  const auto tail = [&](size_t k) { return (byte(k) & 0xC0) == 0x80; };
  if (i >= text.size()) return 0;
  const unsigned a = byte(0), b = byte(1);
  if (a < 0x80) return 1;
  if (a >= 0xC2 && a <= 0xDF) return tail(1) ? 2 : 0;
  if (a >= 0xE0 && a <= 0xEF) {
    // E0: no overlong forms; ED: no surrogates.
    if ((a == 0xE0 && b < 0xA0) || (a == 0xED && b > 0x9F)) return 0;
    return tail(1) && tail(2) ? 3 : 0;
  }
  if (a >= 0xF0 && a <= 0xF4) {
    // F0: no overlong forms; F4: nothing above U+10FFFF.
    if ((a == 0xF0 && b < 0x90) || (a == 0xF4 && b > 0x8F)) return 0;
    return tail(1) && tail(2) && tail(3) ? 4 : 0;
  }
  return 0;
}

char32_t utf8_decode(std::string_view text, size_t i) {
  const size_t length = utf8_length(text, i);
  const auto first = static_cast<unsigned char>(text[i]);
  if (length <= 1) return first;
  char32_t character = first & (0x7F >> length);
  for (size_t k = 1; k < length; ++k) {
    character = character << 6 | (static_cast<unsigned char>(text[i + k]) & 63);
  }
  return character;
}

void utf8_append(std::string& text, char32_t c) {
  const auto put = [&](char32_t byte) { text += static_cast<char>(byte); };
  const auto tail = [&](int shift) { put(0x80 | (c >> shift & 63)); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6);
    tail(0);
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12);
    tail(6);
    tail(0);
  } else {
    put(0xF0 | c >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
}

size_t utf8_error(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const size_t length = utf8_length(text, i);
    if (length == 0) return i;
    i += length;
  }
  return std::string_view::npos;
}

}  // namespace tapeline
