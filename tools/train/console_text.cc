#include "tools/train/console_text.h"

#include "absl/strings/str_cat.h"

namespace tapeline {
namespace {

// A word as a shell reads it back.
std::string quoted(const std::string& word) {
  const bool plain =
      !word.empty() &&
      word.find_first_not_of(
          "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
          "-_=./:,+@%") == std::string::npos;
  if (plain) return word;
  std::string out = "'";
  for (char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

}  // namespace

std::string resume_command(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) {
    if (word.starts_with("--resume")) continue;
    absl::StrAppend(&out, quoted(word), " ");
  }
  return out + "--resume";
}

std::string printable(std::string text) {
  for (char& c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c != '\n' && (byte < 32 || byte >= 127)) c = '?';
  }
  return text;
}

}  // namespace tapeline
