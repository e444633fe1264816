// tapeline generate: continues a prompt, byte by byte.

#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "runtime/device.h"
#include "runtime/file.h"
#include "tools/tapeline/verbs.h"
#include "tools/train/generate.h"
#include "tools/train/load_model.h"

namespace tapeline {
namespace {

struct GenerateFlags {
  std::string model, prompt, prompt_ids, device = "auto";
  int64_t max_tokens = 128, seed = 0, threads = kAllThreads;
  double temperature = 0, top_p = 1;
  bool no_cache = false, json = false;
};

Flags make_flags(GenerateFlags& f) {
  Flags flags("generate");
  flags.add("model", &f.model, "DIR", "Hugging Face folder (required)");
  flags.add("prompt", &f.prompt, "S", "text to continue, as bytes");
  flags.add("prompt_ids", &f.prompt_ids, "A,B,C", "or ids to continue");
  flags.add("max_tokens", &f.max_tokens, "N", "at most so many (128)");
  flags.add("temperature", &f.temperature, "X", "0 is greedy (0)");
  flags.add("top_p", &f.top_p, "X", "most likely tokens of this mass (1)");
  flags.add("seed", &f.seed, "N", "of the draws (0)");
  flags.add("no_cache", &f.no_cache, "", "make all keys again for each token");
  flags.add("device", &f.device, "auto|cpu|cuda", "where (a GPU if there)");
  flags.add("threads", &f.threads, "N", "processors to use (all)");
  flags.add("json", &f.json, "", "print prompt_ids, ids and text as JSON");
  return flags;
}

std::string check(const GenerateFlags& f) {
  if (f.model.empty()) return "--model is missing; give a folder";
  if (f.prompt.empty() && f.prompt_ids.empty()) {
    return "--prompt is missing; give some text";
  }
  if (!f.prompt.empty() && !f.prompt_ids.empty()) {
    return "--prompt and --prompt_ids are both given; give one";
  }
  if (f.max_tokens < 1) return "--max_tokens must be at least 1";
  if (f.temperature < 0) return "--temperature must be at least 0";
  if (!(f.top_p > 0 && f.top_p <= 1))
    return "--top_p must be above 0, at most 1";
  if (f.seed < 0) return "--seed must be at least 0";
  if (std::string wrong = check_device(f.device); !wrong.empty()) {
    return wrong;
  }
  return std::string(check_threads(f.threads));
}

// "3,14,15"; empty: no list of ids.
std::vector<int32_t> parse_ids(const std::string& text) {
  std::vector<int32_t> ids;
  const std::vector<std::string> words = absl::StrSplit(text, ',');
  for (const std::string& word : words) {
    int32_t id = 0;
    if (!absl::SimpleAtoi(word, &id) || id < 0) return {};
    ids.push_back(id);
  }
  return ids;
}

// Bytes are all this program can read; a model with a tokenizer means others.
void note_tokenizer(const std::string& folder) {
  for (const char* name : {"tokenizer.json", "tokenizer.model"}) {
    if (!path_exists(join_path(folder, name))) continue;
    std::cerr << "tapeline: note: " << name
              << " is not used, the prompt is read as bytes; ids of a "
                 "tokenizer go into --prompt_ids\n";
    return;
  }
}

Json ids_json(const std::vector<int32_t>& ids) {
  Json::Array array;
  for (int32_t id : ids) array.emplace_back(id);
  return array;
}

}  // namespace

int generate_verb(const Arguments& arguments) {
  GenerateFlags f;
  Flags flags = make_flags(f);
  const absl::StatusOr<bool> parsed = parse_or_help(flags, arguments);
  if (!parsed.ok()) return fail(kExitUsage, parsed.status());
  if (!*parsed) return end_output();
  if (const std::string wrong = check(f); !wrong.empty()) {
    return fail(kExitUsage, wrong);
  }
  const std::vector<int32_t> prompt =
      f.prompt_ids.empty() ? byte_ids(f.prompt) : parse_ids(f.prompt_ids);
  if (prompt.empty()) {
    return fail(kExitUsage, absl::StrCat("--prompt_ids is '", f.prompt_ids,
                                         "'; give ids like 3,14,15"));
  }
  if (const absl::Status status = use_device(f.device, f.threads);
      !status.ok()) {
    return fail(kExitBadInput, status);
  }
  absl::StatusOr<std::unique_ptr<LanguageModel>> model =
      load_language_model(user_path(f.model), {});
  if (!model.ok()) return fail(kExitBadInput, model.status());
  if (!f.prompt.empty()) note_tokenizer(user_path(f.model));
  const GenerateOptions options = {
      .max_tokens = f.max_tokens,
      .temperature = f.temperature,
      .top_p = f.top_p,
      .seed = static_cast<uint64_t>(f.seed),
      .cache = !f.no_cache,
  };
  const absl::StatusOr<std::vector<int32_t>> ids =
      generate(**model, prompt, options);
  if (!ids.ok()) return fail(exit_code(ids.status()), ids.status());
  if (!f.json) {
    std::cout << f.prompt << byte_text(*ids) << "\n";
    return end_output();
  }
  Json out;
  out["schema"] = 1;
  out["prompt_ids"] = ids_json(prompt);
  out["ids"] = ids_json(*ids);
  out["text"] = byte_text(*ids);
  std::cout << out.dump() << "\n";
  return end_output();
}

}  // namespace tapeline
