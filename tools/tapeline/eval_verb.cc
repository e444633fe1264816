// tapeline eval: cross-entropy of a text, each byte predicted once.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iomanip>
#include <iostream>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "tools/data/batches.h"
#include "tools/data/corpus.h"
#include "tools/tapeline/verbs.h"
#include "tools/train/evaluate.h"
#include "tools/train/load_model.h"

namespace tapeline {
namespace {

struct EvalFlags {
  std::string model, data, device = "auto";
  int64_t seq_len = 0, threads = kAllThreads;
  bool json = false;
};

// Windows as long as the model was made for, within reason.
int64_t default_seq_len(const LanguageModel& model) {
  const Json* most = model.config().find("max_position_embeddings");
  const int64_t length =
      most != nullptr && most->is_integer() ? most->integer() : 1024;
  return std::clamp<int64_t>(length, 1, 1024);
}

}  // namespace

int eval_verb(const Arguments& arguments) {
  EvalFlags f;
  Flags flags("eval");
  flags.add("model", &f.model, "DIR", "Hugging Face folder (required)");
  flags.add("data", &f.data, "F",
            "text file, or king_james:train|val|test (required)");
  flags.add("seq_len", &f.seq_len, "N",
            "tokens of a window (the model's, at most 1024)");
  flags.add("device", &f.device, "auto|cpu|cuda", "where (a GPU if there)");
  flags.add("threads", &f.threads, "N", "processors to use (all)");
  flags.add("json", &f.json, "", "print the result as JSON");
  const absl::StatusOr<bool> parsed = parse_or_help(flags, arguments);
  if (!parsed.ok()) return fail(kExitUsage, parsed.status());
  if (!*parsed) return end_output();
  if (f.model.empty()) return fail(kExitUsage, "--model is missing");
  if (f.data.empty()) return fail(kExitUsage, "--data is missing");
  if (f.seq_len < 0 || f.seq_len > 1048576) {
    return fail(kExitUsage, "--seq_len must be from 1 to 1048576");
  }
  if (const auto wrong = check_threads(f.threads); !wrong.empty()) {
    return fail(kExitUsage, wrong);
  }
  if (const auto wrong = check_device(f.device); !wrong.empty()) {
    return fail(kExitUsage, wrong);
  }
  if (const absl::Status status = use_device(f.device, f.threads);
      !status.ok()) {
    return fail(kExitBadInput, status);
  }
  absl::StatusOr<std::unique_ptr<LanguageModel>> model =
      load_language_model(user_path(f.model), {});
  if (!model.ok()) return fail(kExitBadInput, model.status());
  const absl::StatusOr<Corpus> corpus = load_corpus(user_corpus(f.data));
  if (!corpus.ok()) return fail(kExitBadInput, corpus.status());
  const absl::Status fits =
      check_vocabulary(*corpus, f.data, (*model)->vocabulary());
  if (!fits.ok()) return fail(kExitBadInput, fits);
  const int64_t seq_len = f.seq_len > 0 ? f.seq_len : default_seq_len(**model);
  const Evaluation e =
      evaluate(**model, EvalBatches(*corpus, seq_len, eval_tokens(seq_len)));
  if (!std::isfinite(e.loss)) {
    return fail(
        kExitNotFinite,
        absl::StrCat(f.data,
                     ": the loss is not finite with the "
                     "weights of ",
                     f.model, "; use weights from before training diverged"));
  }
  if (f.json) {
    Json out;
    out["schema"] = 1;
    out["loss"] = e.loss;
    out["bits_per_byte"] = e.bits_per_byte;
    out["bytes"] = e.bytes;
    out["tokens"] = e.tokens;
    std::cout << out.dump() << "\n";
  } else {
    std::cout << std::setprecision(5) << std::fixed << "loss " << e.loss
              << " | " << e.bits_per_byte << " bits per byte | " << e.bytes
              << " bytes\n";
  }
  return end_output();
}

}  // namespace tapeline
