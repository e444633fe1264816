// Text generation: one token at a time, greedy or sampled.
//
//   temperature 0     the token with the largest logit, the lowest id of equals
//   temperature t     p = softmax(logits / t), cut to the most likely tokens
//                     whose probabilities first reach top_p, renormalised
// Token i of the output draws element i of the stream (seed, "sample"): the
// same prompt, seed and model give the same text, with the cache or without.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tools/train/language_model.h"

namespace tapeline {

struct GenerateOptions {
  int64_t max_tokens = 128;
  double temperature = 0;
  double top_p = 1;
  uint64_t seed = 0;
  bool cache = true;  // keys of earlier tokens are kept, not made again
};

// The ids after the prompt, ending with an end-of-text id if one comes. An
// empty prompt or an id outside the vocabulary is InvalidArgument, logits that
// are not finite OutOfRange with kExitNotFinite.
absl::StatusOr<std::vector<int32_t>> generate(
    const LanguageModel& model, const std::vector<int32_t>& prompt,
    const GenerateOptions& options);

// Index of the token to take, given one row of logits.
int32_t choose_token(const std::vector<float>& logits,
                     const GenerateOptions& options, uint64_t draw);

// The byte tokenizer: ids are bytes.
std::vector<int32_t> byte_ids(std::string_view text);
// Ids of 256 and above have no byte and are left out.
std::string byte_text(const std::vector<int32_t>& ids);

}  // namespace tapeline
