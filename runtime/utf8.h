// UTF-8 (RFC 3629): shortest forms only, no surrogates, up to U+10FFFF.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tapeline {

// Bytes of the character at text[i], 1 to 4; 0 where there is none.
size_t utf8_length(std::string_view text, size_t i);
// The character at text[i], whose length was not 0.
char32_t utf8_decode(std::string_view text, size_t i);
void utf8_append(std::string& text, char32_t character);
// Offset of the first byte that begins no character; npos: all is well.
size_t utf8_error(std::string_view text);

}  // namespace tapeline
