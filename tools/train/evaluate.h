// Evaluation: cross-entropy of a whole corpus, each byte predicted once.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "tools/data/batches.h"
#include "tools/data/corpus.h"
#include "tools/train/language_model.h"

namespace tapeline {

struct Evaluation {
  double loss = 0;  // nats per predicted token, next-token loss alone
  double bits_per_byte = 0;
  int64_t bytes = 0, tokens = 0;
};

// Tokens of a micro-batch of windows of this length.
int64_t eval_tokens(int64_t seq_len);

// InvalidArgument if a byte of the corpus, which `name` stands for, is no token
// of the vocabulary.
absl::Status check_vocabulary(const Corpus& corpus, const std::string& name,
                              int64_t vocabulary);

// No tape, no expert counts, no auxiliary losses. `stop` is asked between
// micro-batches; true ends the evaluation early with bytes = 0.
Evaluation evaluate(const LanguageModel& model, const EvalBatches& batches,
                    bool (*stop)() = nullptr);

}  // namespace tapeline
