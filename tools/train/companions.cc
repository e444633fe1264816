#include "tools/train/companions.h"

#include <algorithm>
#include <iterator>
#include <string_view>

#include "runtime/file.h"
#include "runtime/status.h"

namespace tapeline {
namespace {

constexpr std::string_view kNames[] = {
    "added_tokens.json", "generation_config.json",
    "merges.txt",        "special_tokens_map.json",
    "vocab.json",        "vocab.txt"};
constexpr std::string_view kPrefixes[] = {"chat_template", "tokenizer",
                                          "tokenization_"};
constexpr std::string_view kSuffixes[] = {".jinja", ".model", ".tiktoken"};

bool carried(const std::string& name) {
  const auto any = [](const auto& list, auto&& matches) {
    return std::any_of(std::begin(list), std::end(list), matches);
  };
  return any(kNames, [&](std::string_view n) { return name == n; }) ||
         any(kPrefixes, [&](auto p) { return name.starts_with(p); }) ||
         any(kSuffixes, [&](auto s) { return name.ends_with(s); });
}

}  // namespace

absl::StatusOr<Companions> read_companions(const std::string& folder,
                                           LanguageModel& model,
                                           const SafetensorsReader& reader) {
  Companions out;
  ASSIGN_OR_RETURN(out.copies, find_copies(model.copies(), reader));
  out.dropped = unknown_tensors(model.named_tensors(), model.copies(), reader);
  ASSIGN_OR_RETURN(const std::vector<std::string> names,
                   list_directory(folder));
  for (const std::string& name : names) {
    const std::string path = join_path(folder, name);
    if (!carried(name) || is_directory(path)) continue;
    ASSIGN_OR_RETURN(out.files[name], read_file(path));
  }
  return out;
}

}  // namespace tapeline
