#include "tools/data/batches.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "runtime/check.h"
#include "runtime/random.h"

namespace tapeline {
namespace {

int32_t token(const Corpus& corpus, int64_t i) {
  return static_cast<unsigned char>(corpus.text[static_cast<size_t>(i)]);
}

// Appends tokens [begin, end) of one document as a sequence.
void append(const Corpus& corpus, const Document& document, int64_t begin,
            int64_t end, MicroBatch& batch) {
  for (int64_t i = begin; i < end; ++i) {
    batch.ids.push_back(token(corpus, i));
    batch.labels.push_back(i + 1 < document.end ? token(corpus, i + 1)
                                                : kNoLabel);
    batch.positions.push_back(static_cast<int32_t>(i - begin));
  }
  batch.cu_seqlens.push_back(static_cast<int32_t>(batch.tokens()));
}

}  // namespace

int64_t MicroBatch::valid_labels() const {
  return tokens() - std::count(labels.begin(), labels.end(), kNoLabel);
}

// Four rounds of a balanced Feistel network over the next even number of bits
// (Luby and Rackoff 1988); values beyond n go round again, at most four times
// on average.
uint64_t shuffled(uint64_t i, uint64_t n, uint64_t seed, uint64_t epoch) {
  CHECK_LT(i, n);
  const Random random(seed, "data.order", epoch);
  const int half = std::max<int>(1, (std::bit_width(n - 1) + 1) / 2);
  const uint64_t mask = (uint64_t{1} << half) - 1;
  do {
    uint64_t left = i >> half, right = i & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t mixed = random.bits64(round << 32 | right) & mask;
      left ^= mixed;
      std::swap(left, right);
    }
    i = left << half | right;
  } while (i >= n);
  return i;
}

absl::StatusOr<TrainBatches> TrainBatches::create(const Corpus& corpus,
                                                  int64_t seq_len,
                                                  int64_t micro_batches,
                                                  uint64_t seed) {
  CHECK(seq_len >= 1 && micro_batches >= 1);
  if (corpus.tokens() < seq_len) {
    return absl::InvalidArgumentError(
        "data.train has " + std::to_string(corpus.tokens()) +
        " tokens, fewer than train.seq_len = " + std::to_string(seq_len) +
        "; use a longer text or shorter sequences");
  }
  TrainBatches batches;
  batches.corpus_ = &corpus;
  batches.seq_len_ = seq_len;
  batches.micro_batches_ = micro_batches;
  batches.windows_ = corpus.tokens() / seq_len;
  batches.seed_ = seed;
  return batches;
}

double TrainBatches::epoch(int64_t step) const {
  return static_cast<double>(step * micro_batches_) /
         static_cast<double>(windows_);
}

int64_t TrainBatches::start(int64_t step, int64_t micro_batch) const {
  CHECK(step >= 0 && micro_batch >= 0 && micro_batch < micro_batches_)
      << "step " << step << ", micro-batch " << micro_batch;
  const int64_t number = step * micro_batches_ + micro_batch;
  const auto epoch = static_cast<uint64_t>(number / windows_);
  const auto place = static_cast<uint64_t>(number % windows_);
  const auto window = static_cast<int64_t>(
      shuffled(place, static_cast<uint64_t>(windows_), seed_, epoch));
  const auto first = static_cast<int64_t>(
      Random(seed_, "data.start", epoch)
          .below(static_cast<uint64_t>(corpus_->tokens()), 0));
  return (first + window * seq_len_) % corpus_->tokens();
}

MicroBatch TrainBatches::get(int64_t step, int64_t micro_batch) const {
  MicroBatch batch;
  batch.cu_seqlens.push_back(0);
  int64_t at = start(step, micro_batch);
  while (batch.tokens() < seq_len_) {
    const Document& document = corpus_->documents[corpus_->document_at(at)];
    const int64_t end = std::min(document.end, at + seq_len_ - batch.tokens());
    append(*corpus_, document, at, end, batch);
    at = end % corpus_->tokens();
  }
  return batch;
}

EvalBatches::EvalBatches(const Corpus& corpus, int64_t seq_len,
                         int64_t token_budget)
    : corpus_(&corpus) {
  CHECK(seq_len >= 1 && token_budget >= seq_len)
      << "windows of " << seq_len << " tokens do not fit " << token_budget;
  int64_t room = 0;
  for (const Document& document : corpus.documents) {
    // The document's last token is a label only.
    for (int64_t at = document.begin; at < document.end - 1; at += seq_len) {
      const int64_t end = std::min(at + seq_len, document.end - 1);
      if (end - at > room) {
        batches_.emplace_back();
        room = token_budget;
      }
      batches_.back().push_back({at, end});
      room -= end - at;
      bytes_ += end - at;
    }
  }
}

MicroBatch EvalBatches::get(int64_t i) const {
  MicroBatch batch;
  batch.cu_seqlens.push_back(0);
  for (const Window& window : batches_[static_cast<size_t>(i)]) {
    const size_t document = corpus_->document_at(window.begin);
    append(*corpus_, corpus_->documents[document], window.begin, window.end,
           batch);
  }
  return batch;
}

}  // namespace tapeline
