#include "tools/data/batches.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

// Documents of the lengths given, their newline included; bytes count up, so a
// token tells its place.
Corpus documents_of(const std::vector<int64_t>& lengths) {
  Corpus corpus;
  for (int64_t length : lengths) {
    const int64_t begin = corpus.tokens();
    corpus.documents.push_back({"d", begin, begin + length});
    corpus.text += '\n';
    for (int64_t i = 1; i < length; ++i) {
      corpus.text += static_cast<char>(corpus.tokens() % 251);
    }
  }
  return corpus;
}

TrainBatches batches_of(const Corpus& corpus, int64_t seq_len,
                        int64_t micro_batches, uint64_t seed = 1) {
  auto batches = TrainBatches::create(corpus, seq_len, micro_batches, seed);
  EXPECT_TRUE(batches.ok()) << batches.status();
  return *std::move(batches);
}

// What each place of a batch must be, from the corpus alone.
void expect_well_formed(const Corpus& corpus, int64_t start,
                        const MicroBatch& batch) {
  const int64_t n = corpus.tokens();
  std::vector<int32_t> cuts = {0};
  int32_t position = 0;
  for (int64_t t = 0; t < batch.tokens(); ++t) {
    const int64_t at = (start + t) % n;
    const size_t document = corpus.document_at(at);
    if (t > 0 && at == corpus.documents[document].begin) {
      cuts.push_back(static_cast<int32_t>(t));
      position = 0;
    }
    EXPECT_EQ(batch.ids[t], static_cast<unsigned char>(corpus.text[at]));
    EXPECT_EQ(batch.positions[t], position++);
    const bool last = at + 1 == corpus.documents[document].end;
    EXPECT_EQ(batch.labels[t],
              last ? -100 : static_cast<unsigned char>(corpus.text[at + 1]));
  }
  cuts.push_back(static_cast<int32_t>(batch.tokens()));
  EXPECT_EQ(batch.cu_seqlens, cuts);
}

TEST(TrainBatches, WindowsCrossDocumentsAsSeparateSequences) {
  const Corpus corpus = documents_of({7, 2, 30, 1, 11, 5});
  const TrainBatches batches = batches_of(corpus, 16, 2);
  std::set<size_t> sequences;
  for (int64_t step = 0; step < 40; ++step) {
    for (int64_t m = 0; m < 2; ++m) {
      const MicroBatch batch = batches.get(step, m);
      ASSERT_EQ(batch.tokens(), 16);
      expect_well_formed(corpus, batches.start(step, m), batch);
      sequences.insert(batch.cu_seqlens.size() - 1);
    }
  }
  EXPECT_TRUE(sequences.contains(1));
  EXPECT_TRUE(sequences.contains(4)) << "some window holds four documents";
}

TEST(TrainBatches, AnEpochReadsEachTokenOnce) {
  const Corpus corpus = documents_of({40, 60, 20, 7});  // 127 = 7 * 18 + 1
  const TrainBatches batches = batches_of(corpus, 7, 3);
  ASSERT_EQ(batches.windows_per_epoch(), 18);
  std::set<int64_t> first_starts;
  for (int64_t epoch = 0; epoch < 4; ++epoch) {
    std::vector<int> seen(127);
    for (int64_t step = 6 * epoch; step < 6 * (epoch + 1); ++step) {
      for (int64_t m = 0; m < 3; ++m) {
        const int64_t start = batches.start(step, m);
        for (int64_t t = 0; t < 7; ++t) ++seen[(start + t) % 127];
      }
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), 126);
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 0), 1);
    first_starts.insert(batches.start(6 * epoch, 0));
  }
  EXPECT_GT(first_starts.size(), 2u) << "epochs differ";
  EXPECT_EQ(batches.epoch(0), 0.0);
  EXPECT_EQ(batches.epoch(9), 1.5);
}

TEST(TrainBatches, DependOnSeedStepAndMicroBatchAlone) {
  const Corpus corpus = documents_of({500, 300});
  const TrainBatches a = batches_of(corpus, 10, 2),
                     b = batches_of(corpus, 10, 2);
  const TrainBatches other = batches_of(corpus, 10, 2, 2);
  // Asked in another order, as after a resume.
  std::vector<int64_t> forward, backward;
  int same = 0;
  for (int64_t step = 0; step < 50; ++step) {
    forward.push_back(a.start(step, 1));
    backward.push_back(b.start(49 - step, 1));
    same += a.start(step, 0) == other.start(step, 0);
  }
  std::reverse(backward.begin(), backward.end());
  EXPECT_EQ(forward, backward);
  EXPECT_LT(same, 5);
  EXPECT_EQ(a.get(3, 1).ids, b.get(3, 1).ids);
}

TEST(TrainBatches, ShortCorpusIsAnError) {
  const Corpus corpus = documents_of({5, 4});
  EXPECT_TRUE(TrainBatches::create(corpus, 9, 1, 0).ok());
  EXPECT_EQ(
      std::string(TrainBatches::create(corpus, 10, 1, 0).status().message()),
      "data.train has 9 tokens, fewer than train.seq_len = 10; use a "
      "longer text or shorter sequences");
}

TEST(Shuffled, IsAPermutationThatChangesWithSeedAndEpoch) {
  for (uint64_t n : {1u, 2u, 3u, 4u, 5u, 16u, 17u, 1000u}) {
    std::vector<uint64_t> order, sorted(n), other;
    std::iota(sorted.begin(), sorted.end(), 0);
    for (uint64_t i = 0; i < n; ++i) {
      order.push_back(shuffled(i, n, 1, 0));
      other.push_back(shuffled(i, n, 1, 1));
    }
    std::vector<uint64_t> check = order;
    std::sort(check.begin(), check.end());
    EXPECT_EQ(check, sorted) << n;
    if (n > 10) {
      EXPECT_NE(order, other);
      EXPECT_NE(order, sorted);
    }
  }
}

TEST(Shuffled, LooksRandom) {
  // Fixed points of a random permutation are 1 +- 1; neighbours that stay
  // neighbours about 2.
  int fixed = 0, together = 0;
  constexpr uint64_t kN = 5000;
  for (uint64_t i = 0; i + 1 < kN; ++i) {
    const uint64_t a = shuffled(i, kN, 7, 3), b = shuffled(i + 1, kN, 7, 3);
    fixed += a == i;
    together += a + 1 == b || b + 1 == a;
  }
  EXPECT_LT(fixed, 8);
  EXPECT_LT(together, 12);
}

TEST(EvalBatches, CountEachByteOnce) {
  const Corpus corpus = documents_of({23, 1, 2, 17, 9, 8});
  for (int64_t seq_len : {1, 4, 8, 100}) {
    for (int64_t budget : {seq_len, seq_len + 3, int64_t{200}}) {
      const EvalBatches batches(corpus, seq_len, budget);
      EXPECT_EQ(batches.bytes(), corpus.bytes());
      std::vector<int32_t> predicted;
      for (int64_t i = 0; i < batches.size(); ++i) {
        const MicroBatch batch = batches.get(i);
        EXPECT_GT(batch.tokens(), 0);
        EXPECT_LE(batch.tokens(), budget);
        EXPECT_EQ(batch.valid_labels(), batch.tokens());
        EXPECT_EQ(batch.cu_seqlens.back(), batch.tokens());
        for (size_t s = 1; s < batch.cu_seqlens.size(); ++s) {
          const int32_t begin = batch.cu_seqlens[s - 1];
          EXPECT_LE(batch.cu_seqlens[s] - begin, seq_len);
          for (int32_t t = begin; t < batch.cu_seqlens[s]; ++t) {
            EXPECT_EQ(batch.positions[t], t - begin);
            if (t > begin) {
              EXPECT_EQ(batch.ids[t], batch.labels[t - 1]);
            }
          }
        }
        predicted.insert(predicted.end(), batch.labels.begin(),
                         batch.labels.end());
      }
      std::vector<int32_t> expected;
      for (const Document& document : corpus.documents) {
        for (int64_t i = document.begin + 1; i < document.end; ++i) {
          expected.push_back(static_cast<unsigned char>(corpus.text[i]));
        }
      }
      EXPECT_EQ(predicted, expected) << seq_len << " " << budget;
    }
  }
}

TEST(EvalBatches, FillTheBudget) {
  const Corpus corpus = documents_of({9, 9, 9, 9});
  const EvalBatches batches(corpus, 8, 16);
  ASSERT_EQ(batches.size(), 2);
  EXPECT_EQ(batches.get(0).cu_seqlens, (std::vector<int32_t>{0, 8, 16}));
  EXPECT_EQ(batches.get(0).ids[8], '\n') << "each document from its newline";
}

TEST(EvalBatchesDeathTest, BudgetHoldsAWindow) {
  const Corpus corpus = documents_of({9});
  EXPECT_DEATH(EvalBatches(corpus, 8, 7), "do not fit 7");
}

}  // namespace
}  // namespace tapeline
