// Micro-batches of a corpus, each a pure function of its number.
//
// Nothing here has a position: what step s, micro-batch m reads depends on
// (seed, s, m) alone, so a run resumes from the step number and ranks take
// their micro-batches without talking to each other.
//
// A micro-batch is a row of tokens cut into sequences by cu_seqlens. Labels are
// the next token of the same document, -100 where the next token is another
// document's; positions count from 0 in each sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tools/data/corpus.h"

namespace tapeline {

inline constexpr int32_t kNoLabel = -100;

struct MicroBatch {
  std::vector<int32_t> ids, labels, positions;  // [T]
  std::vector<int32_t> cu_seqlens;              // 0, ..., T

  int64_t tokens() const { return static_cast<int64_t>(ids.size()); }
  int64_t valid_labels() const;
};

// Training: windows of exactly seq_len tokens. An epoch is a random order of
// all windows at multiples of seq_len from a random start, around the end of
// the text to its beginning, so each token is read once (but for the rest of
// the division by seq_len, which differs from epoch to epoch). A window that
// crosses documents is one sequence per document.
class TrainBatches {
 public:
  // The corpus outlives this.
  static absl::StatusOr<TrainBatches> create(const Corpus& corpus,
                                             int64_t seq_len,
                                             int64_t micro_batches,
                                             uint64_t seed);

  MicroBatch get(int64_t step, int64_t micro_batch) const;
  int64_t windows_per_epoch() const { return windows_; }
  // Epochs begun before the step, as a fraction.
  double epoch(int64_t step) const;
  // First token of a window; for tests of the order.
  int64_t start(int64_t step, int64_t micro_batch) const;

 private:
  TrainBatches() = default;
  const Corpus* corpus_ = nullptr;
  int64_t seq_len_ = 0, micro_batches_ = 0, windows_ = 0;
  uint64_t seed_ = 0;
};

// Evaluation: each byte of the documents' text is a label exactly once.
// Documents are cut into consecutive windows of seq_len tokens, which know
// nothing of the window before; windows are sequences, packed in order into
// micro-batches of at most `token_budget` tokens.
class EvalBatches {
 public:
  // The corpus outlives this. token_budget >= seq_len.
  EvalBatches(const Corpus& corpus, int64_t seq_len, int64_t token_budget);

  int64_t size() const { return static_cast<int64_t>(batches_.size()); }
  MicroBatch get(int64_t i) const;
  int64_t bytes() const { return bytes_; }  // labels over all micro-batches

 private:
  struct Window {
    int64_t begin, end;
  };
  const Corpus* corpus_;
  std::vector<std::vector<Window>> batches_;
  int64_t bytes_ = 0;
};

// A permutation of 0 .. n - 1 chosen by (seed, epoch), one element at a time.
uint64_t shuffled(uint64_t i, uint64_t n, uint64_t seed, uint64_t epoch);

}  // namespace tapeline
