#include "kernels/indexer/indexer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/indexer/indexer_cases.h"
#include "kernels/top_k/top_k.h"
#include "tests/support/buffer.h"
#include "tests/support/close.h"
#include "tests/support/fixture.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Inputs and outputs of one case, strided, outputs and workspace poisoned.
template <class T>
struct Problem {
  using A = Accumulator<T>;
  explicit Problem(const IndexerCase& test_case, int64_t gap = 3)
      : c(test_case),
        q({c.tokens(), c.heads, c.dim}, gap),
        k({c.keys, c.dim}, gap),
        w({c.tokens(), c.heads}, gap),
        scores({c.tokens(), c.keys}, gap),
        workspace({static_cast<int64_t>(
            // Either side may run.
            std::max(
                indexer_select_workspace_bytes<T>(launch(), c.tokens(), c.keys),
                indexer_select_workspace_bytes<T>(Launch{}, c.tokens(),
                                                  c.keys)) /
            sizeof(A))}),
        begin({c.tokens()}),
        end({c.tokens()}),
        ids({c.tokens(), c.selected}, gap) {
    q.normal(1);
    k.normal(2);
    w.normal(3);
    for (int64_t t = 0; t < c.tokens(); ++t) {
      begin.view()(t) = c.range[t].first;
      end.view()(t) = c.range[t].second;
    }
  }
  KeyRange range() const { return {begin.in(), end.in()}; }
  void score(Launch l) {
    indexer_scores<T>(l, q.in(), k.in(), w.in(), range(), c.scale,
                      scores.view());
  }
  void select(Launch l) {
    workspace.poison();
    indexer_select<T>(l, q.in(), k.in(), w.in(), range(), c.scale, c.selected,
                      ids.view(),
                      reinterpret_cast<std::byte*>(workspace.view().data));
  }

  IndexerCase c;
  Buffer<T> q, k;
  Buffer<A> w, scores, workspace;
  Buffer<int32_t> begin, end, ids;
};

std::vector<double> by_definition(const IndexerCase& c,
                                  const std::vector<double>& q,
                                  const std::vector<double>& k,
                                  const std::vector<double>& w) {
  std::vector<double> out;
  for (int64_t t = 0; t < c.tokens(); ++t) {
    for (int64_t s = 0; s < c.keys; ++s) {
      double score = 0;
      for (int64_t h = 0; h < c.heads; ++h) {
        double dot = 0;
        for (int64_t d = 0; d < c.dim; ++d) {
          dot += q[(t * c.heads + h) * c.dim + d] * k[s * c.dim + d];
        }
        if (dot > 0) score += w[t * c.heads + h] * dot * c.scale;
      }
      const bool in_range = c.range[t].first <= s && s < c.range[t].second;
      out.push_back(in_range ? score : -kInfinity);
    }
  }
  return out;
}

class IndexerTest : public testing::TestWithParam<IndexerCase> {
 protected:
  template <class T>
  void expect_definition() {
    Problem<T> p(GetParam());
    p.score(launch());
    const std::vector<double> e =
        by_definition(p.c, p.q.values(), p.k.values(), p.w.values());
    // Against the size of all scores: those of a row may cancel.
    std::vector<Accumulator<T>> got;
    for (double x : p.scores.values()) got.push_back(Accumulator<T>(x));
    EXPECT_TRUE(Close(got, e, {p.c.heads * p.c.dim}));
    EXPECT_TRUE(p.scores.guards_intact());
  }

  template <class T>
  void expect_selection_of_scores() {
    Problem<T> p(GetParam());
    p.score(launch());
    p.select(launch());
    Buffer<int32_t> expected({p.c.tokens(), p.c.selected});
    top_k<Accumulator<T>>(launch(), p.scores.in(), p.range(), p.c.selected,
                          expected.view());
    EXPECT_EQ(p.ids.values(), expected.values());
    EXPECT_TRUE(p.ids.guards_intact());
    EXPECT_TRUE(p.workspace.guards_intact());
  }
};

TEST_P(IndexerTest, ScoresEqualTheDefinitionInF32) {
  expect_definition<float>();
}
TEST_P(IndexerTest, ScoresEqualTheDefinitionInF64) {
  expect_definition<double>();
}
TEST_P(IndexerTest, ScoresEqualTheDefinitionInBf16) {
  expect_definition<bf16>();
}
TEST_P(IndexerTest, SelectionIsTopKOfTheScores) {
  expect_selection_of_scores<float>();
  expect_selection_of_scores<double>();
  expect_selection_of_scores<bf16>();
}

INSTANTIATE_TEST_SUITE_P(Cases, IndexerTest, testing::ValuesIn(indexer_cases()),
                         [](const auto& info) { return info.param.name; });

IndexerCase find(const std::string& name) {
  for (const IndexerCase& c : indexer_cases()) {
    if (c.name == name) return c;
  }
  ADD_FAILURE() << "no case " << name;
  return {};
}

// Computed in f64 by torch from bf16 inputs: two packed sequences.
template <class T>
void expect_golden() {
  const Fixture golden = Fixture::open("tests/data/ops/indexer.safetensors");
  const Shape q = golden.shape("q");
  IndexerCase c{"golden",
                q[1],
                q[2],
                q[0],
                static_cast<int>(golden.shape("ids")[1]),
                packed({24, 40}),
                1 / std::sqrt(static_cast<double>(q[2]))};
  Problem<T> p(c);
  p.q.set(golden.values("q"));
  p.k.set(golden.values("k"));
  std::vector<double> w = golden.values("w");
  for (double& x : w) x /= std::sqrt(static_cast<double>(c.heads));
  p.w.set(w);
  p.score(launch());
  p.select(launch());
  const std::vector<float> scores = golden.floats("scores");
  EXPECT_TRUE(Close(p.scores.in(),
                    View<const float>(scores.data(), p.scores.in().shape),
                    {c.heads * c.dim}));
  // Golden ids are best first, then -1.
  std::vector<int32_t> ids = golden.ints("ids");
  for (auto row = ids.begin(); row != ids.end(); row += c.selected) {
    std::sort(row, row + c.selected, [](int32_t a, int32_t b) {
      return static_cast<uint32_t>(a) < static_cast<uint32_t>(b);
    });
  }
  EXPECT_EQ(p.ids.values(), std::vector<double>(ids.begin(), ids.end()));
}
TEST(Indexer, EqualsGoldenValuesInF32) { expect_golden<float>(); }
TEST(Indexer, EqualsGoldenValuesInF64) { expect_golden<double>(); }
TEST(Indexer, EqualsGoldenValuesInBf16) { expect_golden<bf16>(); }

TEST(Indexer, ThreadsDoNotChangeABit) {
  Problem<float> p(find("Training"));
  EXPECT_TRUE(SameForAnyThreads(p.scores, [&](Launch l) { p.score(l); }));
  EXPECT_TRUE(SameForAnyThreads(p.ids, [&](Launch l) { p.select(l); }));
}

TEST(Indexer, SelectionWorksInTilesOfRows) {
  const Launch cpu{}, gpu{.kind = DeviceKind::kCuda};
  const auto bytes = [](const Launch& l, int64_t tokens) {
    return indexer_select_workspace_bytes<float>(l, tokens, 1000);
  };
  const size_t one = bytes(cpu, 1);
  EXPECT_EQ(one, 4000u);
  EXPECT_EQ(bytes(gpu, 1), one);
  EXPECT_EQ(bytes(cpu, 128), 128 * one);
  EXPECT_EQ(bytes(cpu, 100000), 128 * one);
  EXPECT_EQ(bytes(gpu, 511), 511 * one);
  EXPECT_EQ(bytes(gpu, 100000), 512 * one);
  EXPECT_EQ(indexer_select_workspace_bytes<double>(cpu, 1, 1000), 2 * one);
  EXPECT_EQ(indexer_select_workspace_bytes<bf16>(cpu, 1, 1000), one);
  // 2^31 scores and more.
  EXPECT_EQ(indexer_select_workspace_bytes<float>(gpu, 4096, 1 << 23),
            (size_t{512} << 23) * 4);
}

// Queries are orthogonal to all keys but some: scores of 0 decide by index.
TEST(Indexer, EqualScoresGoToTheSmallerKey) {
  IndexerCase c{"", 1, 2, 70, 4, {{0, 70}, {10, 70}}, 1.0};
  Problem<float> p(c);
  p.q.set({1, 0, 1, 0});
  p.w.set({1, 1});
  std::vector<double> k;
  for (int s = 0; s < 70; ++s) {
    k.push_back(s == 66 ? 2 : -1);  // relu(-1) = 0
    k.push_back(s);
  }
  p.k.set(k);
  p.select(launch());
  EXPECT_EQ(p.ids.values(), (std::vector<double>{0, 1, 2, 66, 10, 11, 12, 66}));
}

TEST(Indexer, KeysOutsideOfTheRangeAreNotRead) {
  const IndexerCase c = find("Training");
  Problem<float> clean(c), p(c);
  for (int64_t s = 170; s < 300; ++s) {  // the second sequence
    for (int64_t d = 0; d < c.dim; ++d) p.k.view()(s, d) = NAN;
  }
  clean.score(launch());
  clean.select(launch());
  p.score(launch());
  p.select(launch());
  for (int64_t t = 0; t < 170; ++t) {
    EXPECT_TRUE(Bitwise(p.scores.in()[t], clean.scores.in()[t])) << t;
    EXPECT_TRUE(Bitwise(p.ids.in()[t], clean.ids.in()[t])) << t;
  }
}

TEST(Indexer, NanScoresAreKept) {
  Problem<float> p(find("SmallOdd"));
  p.q.view()(1, 0, 0) = NAN;
  p.score(launch());
  EXPECT_TRUE(std::isnan(p.scores.view()(1, 0)));
  EXPECT_FALSE(std::isnan(p.scores.view()(2, 0)));
}

TEST(IndexerDeathTest, NamesTheShapesThatDisagree) {
  Problem<float> p(find("SmallOdd"));
  const Buffer<float> k({7, 6});
  EXPECT_DEATH(
      indexer_scores<float>(launch(), p.q.in(), k.in(), p.w.in(), p.range(),
                            1.0, p.scores.view()),
      "\\[indexer_scores\\] shapes: q is f32\\[7, 3, 5\\].*f32\\[7, 6\\]");
}

}  // namespace
}  // namespace tapeline
