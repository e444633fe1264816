#include "kernels/top_k/top_k.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/top_k/top_k_cases.h"
#include "tests/support/buffer.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

// The candidates sorted by score, a NaN last, ties by id; then k of them sorted
// by id.
std::vector<int32_t> by_sorting(const TopKCase& c) {
  std::vector<int32_t> out;
  for (int64_t i = 0; i < c.rows; ++i) {
    const auto [begin, end] =
        c.range.empty() ? std::pair<int32_t, int32_t>(0, c.keys) : c.range[i];
    std::vector<int32_t> ids;
    const float* x = c.scores.data() + i * c.keys;
    for (int32_t s = begin; s < end; ++s) {
      if (x[s] != -std::numeric_limits<float>::infinity()) ids.push_back(s);
    }
    std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
      if (std::isnan(x[a]) || std::isnan(x[b])) {
        return !std::isnan(x[a]) && std::isnan(x[b]);
      }
      return x[a] > x[b];
    });
    ids.resize(std::min<size_t>(ids.size(), c.k));
    std::sort(ids.begin(), ids.end());
    ids.resize(c.k, -1);
    out.insert(out.end(), ids.begin(), ids.end());
  }
  return out;
}

template <class S>
struct Problem {
  explicit Problem(const TopKCase& test_case)
      : c(test_case),
        scores({c.rows, c.keys}, 5),
        begin({c.rows}),
        end({c.rows}),
        ids({c.rows, c.k}, 3) {
    scores.set(std::vector<double>(c.scores.begin(), c.scores.end()));
    if (c.range.empty()) return;
    for (int64_t i = 0; i < c.rows; ++i) {
      begin.view()(i) = c.range[i].first;
      end.view()(i) = c.range[i].second;
    }
    range = {begin.in(), end.in()};
  }
  void run(Launch l) {
    top_k<S>(l, scores.in(), range, c.k, ids.view());
    EXPECT_TRUE(ids.guards_intact());
  }
  std::vector<int32_t> result() const {
    const std::vector<double> values = ids.values();
    return {values.begin(), values.end()};
  }

  TopKCase c;
  Buffer<S> scores;
  Buffer<int32_t> begin, end, ids;
  KeyRange range;
};

template <class S>
std::vector<int32_t> run(const TopKCase& c) {
  Problem<S> p(c);
  p.run(launch());
  return p.result();
}

class TopKTest : public testing::TestWithParam<TopKCase> {};

TEST_P(TopKTest, EqualsSorting) {
  EXPECT_EQ(run<float>(GetParam()), by_sorting(GetParam()));
  EXPECT_EQ(run<double>(GetParam()), by_sorting(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Cases, TopKTest, testing::ValuesIn(top_k_cases()),
                         [](const auto& info) { return info.param.name; });

std::vector<int32_t> row(const std::vector<float>& scores, int k) {
  return run<float>(
      {"", 1, static_cast<int64_t>(scores.size()), k, scores, {}});
}

TEST(TopK, TiesGoToTheSmallerIndex) {
  EXPECT_EQ(row({1, 2, 1, 2, 1, 1}, 4), (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(row({0.0f, -0.0f, 0.0f}, 2), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(row({-0.0f, 0.0f, 0.0f}, 1), (std::vector<int32_t>{0}));
}

TEST(TopK, MinusInfinityIsNoCandidateAndNanIsTheLast) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(row({-inf, NAN, 3, -inf, NAN, inf}, 3),
            (std::vector<int32_t>{1, 2, 5}));
  EXPECT_EQ(row({-inf, NAN, 3, -inf, NAN, inf}, 2),
            (std::vector<int32_t>{2, 5}));
  EXPECT_EQ(row({-inf, NAN, 3, -inf, NAN, inf}, 6),
            (std::vector<int32_t>{1, 2, 4, 5, -1, -1}));
}

TEST(TopK, ScoresOutsideTheRangeAreNotRead) {
  // Far outside of the allocation if they were.
  std::vector<float> scores = {1, 2, 3};
  const View<const float> view(scores.data() - 1000, {1, 2000}, {2000, 1});
  const std::vector<int32_t> begin = {1000}, end = {1003};
  std::vector<int32_t> ids(2);
  top_k<float>(launch(), view, {view_of(begin, {1}), view_of(end, {1})}, 2,
               view_of(ids, {1, 2}));
  EXPECT_EQ(ids, (std::vector<int32_t>{1001, 1002}));
}

TEST(TopK, ThreadsChangeNothing) {
  Problem<float> p(drawn("", 64, 4096, 8, [](float x, int64_t) { return x; }));
  EXPECT_TRUE(SameForAnyThreads(p.ids, [&](Launch l) { p.run(l); }));
}

TEST(TopKDeathTest, NamesTheShapesThatDisagree) {
  Buffer<float> scores({2, 9});
  Buffer<int32_t> ids({2, 4});
  EXPECT_DEATH(top_k<float>(launch(), scores.in(), {}, 5, ids.view()),
               "\\[top_k\\] shapes: scores is f32\\[2, 9\\], ids is "
               "i32\\[2, 4\\], k is 5");
}

}  // namespace
}  // namespace tapeline
