#include "kernels/attention/attention.h"

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/attention/attention_cases.h"
#include "tests/support/buffer.h"
#include "tests/support/close.h"
#include "tests/support/finite_differences.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

// Inputs and outputs of one case, strided, outputs poisoned.
template <class T>
struct Problem {
  explicit Problem(const AttentionCase& test_case, int64_t gap = 3)
      : c(test_case),
        q({c.tokens(), c.heads, c.qk_dim}, gap),
        k({c.keys, c.groups, c.qk_dim}, gap),
        v({c.keys, c.groups, c.v_dim}, gap),
        dout({c.tokens(), c.heads, c.v_dim}, gap),
        o({c.tokens(), c.heads, c.v_dim}, gap),
        dq({c.tokens(), c.heads, c.qk_dim}, gap),
        dk({c.keys, c.groups, c.qk_dim}, gap),
        dv({c.keys, c.groups, c.v_dim}, gap),
        lse({c.tokens(), c.heads}, gap),
        begin({c.tokens()}),
        end({c.tokens()}) {
    q.normal(1);
    k.normal(2);
    v.normal(3);
    dout.normal(4);
    for (int64_t t = 0; t < c.tokens(); ++t) {
      begin.view()(t) = c.range[t].first;
      end.view()(t) = c.range[t].second;
    }
  }
  KeyRange range() const { return {begin.in(), end.in()}; }
  void forward(Launch l) {
    attention_forward<T>(l, q.in(), k.in(), v.in(), range(), c.scale, o.view(),
                         lse.view());
  }
  void backward(Launch l) {
    std::vector<std::byte> space(attention_backward_workspace_bytes<T>(
        l, q.in(), k.in(), v.in(), o.in(), c.scale));
    attention_backward<T>(l, dout.in(), q.in(), k.in(), v.in(), o.in(),
                          lse.in(), range(), c.scale, dq.view(), dk.view(),
                          dv.view(), space.data());
  }
  void expect_guards_intact() const {
    EXPECT_TRUE(o.guards_intact());
    EXPECT_TRUE(lse.guards_intact());
    EXPECT_TRUE(dq.guards_intact());
    EXPECT_TRUE(dk.guards_intact());
    EXPECT_TRUE(dv.guards_intact());
  }

  AttentionCase c;
  Buffer<T> q, k, v, dout, o, dq, dk, dv;
  Buffer<Accumulator<T>> lse;
  Buffer<int32_t> begin, end;
};

// The definition, pair by pair in f64, all probabilities at hand. `rounded_o`
// is what the backward is given: in bf16 its rounding moves do . o by more than
// all else.
struct Expected {
  std::vector<double> o, lse, dq, dk, dv;
};
Expected by_definition(const AttentionCase& c, const std::vector<double>& q,
                       const std::vector<double>& k,
                       const std::vector<double>& v,
                       const std::vector<double>& dout,
                       const std::vector<double>& rounded_o) {
  const int64_t H = c.heads, D = c.qk_dim, V = c.v_dim;
  Expected e;
  e.o.assign(c.tokens() * H * V, 0);
  e.lse.assign(c.tokens() * H, std::numeric_limits<double>::infinity());
  e.dq.assign(q.size(), 0);
  e.dk.assign(k.size(), 0);
  e.dv.assign(v.size(), 0);
  for (int64_t t = 0; t < c.tokens(); ++t) {
    for (int64_t h = 0; h < H; ++h) {
      const auto [first, last] = c.range[t];
      if (first >= last) continue;
      const double* qr = &q[(t * H + h) * D];
      const double* dor = &dout[(t * H + h) * V];
      const int64_t g = h * c.groups / H;
      std::vector<double> score(last - first), dp(last - first);
      double max = -std::numeric_limits<double>::infinity(), sum = 0;
      for (int32_t j = first; j < last; ++j) {
        double s = 0;
        for (int64_t d = 0; d < D; ++d) {
          s += qr[d] * k[(j * c.groups + g) * D + d];
        }
        score[j - first] = s * c.scale;
        max = std::max(max, s * c.scale);
      }
      for (double s : score) sum += std::exp(s - max);
      e.lse[t * H + h] = max + std::log(sum);
      double mean_dp = 0;
      for (int64_t i = 0; i < V; ++i) {
        mean_dp += dor[i] * rounded_o[(t * H + h) * V + i];
      }
      for (int32_t j = first; j < last; ++j) {
        const double p = std::exp(score[j - first] - max) / sum;
        for (int64_t i = 0; i < V; ++i) {
          const int64_t at = (j * c.groups + g) * V + i;
          e.o[(t * H + h) * V + i] += p * v[at];
          e.dv[at] += p * dor[i];
          dp[j - first] += dor[i] * v[at];
        }
        score[j - first] = p;
      }
      for (int32_t j = first; j < last; ++j) {
        const double ds =
            score[j - first] * (dp[j - first] - mean_dp) * c.scale;
        for (int64_t d = 0; d < D; ++d) {
          const int64_t at = (j * c.groups + g) * D + d;
          e.dq[(t * H + h) * D + d] += ds * k[at];
          e.dk[at] += ds * qr[d];
        }
      }
    }
  }
  return e;
}

template <class T>
void expect_close(const Buffer<T>& got, const std::vector<double>& expected,
                  const Tolerance& tolerance, const char* what) {
  const View<const double> e(expected.data(), got.in().shape);
  EXPECT_TRUE(Close(got.in(), e, tolerance)) << what;
}
template <class T>
std::vector<T> flat(const Buffer<T>& x) {
  std::vector<T> out;
  for (double v : x.values()) out.push_back(T(v));
  return out;
}
// A gradient against the size of the whole tensor: that of a row with one key,
// say, is a difference of equal numbers.
template <class T>
void expect_gradient(const Buffer<T>& got, const std::vector<double>& expected,
                     const Tolerance& tolerance, const char* what) {
  EXPECT_TRUE(Close(flat(got), expected, tolerance)) << what;
}

class AttentionTest : public testing::TestWithParam<AttentionCase> {
 protected:
  template <class T>
  void expect_definition() {
    Problem<T> p(GetParam());
    const AttentionCase& c = p.c;
    p.forward(launch());
    p.backward(launch());
    const Expected e =
        by_definition(c, p.q.values(), p.k.values(), p.v.values(),
                      p.dout.values(), p.o.values());
    const int64_t terms = c.qk_dim + c.keys;
    expect_close(p.o, e.o, {terms, c.tolerance}, "o");
    expect_close(p.lse, e.lse, {terms, c.tolerance}, "lse");
    const int64_t pairs = terms + c.v_dim + c.tokens() * c.heads / c.groups;
    expect_gradient(p.dq, e.dq, {pairs, c.tolerance}, "dq");
    expect_gradient(p.dk, e.dk, {pairs, c.tolerance}, "dk");
    expect_gradient(p.dv, e.dv, {pairs, c.tolerance}, "dv");
    p.expect_guards_intact();
  }
};

TEST_P(AttentionTest, EqualsTheDefinitionInF32) { expect_definition<float>(); }
TEST_P(AttentionTest, EqualsTheDefinitionInF64) { expect_definition<double>(); }
TEST_P(AttentionTest, EqualsTheDefinitionInBf16) { expect_definition<bf16>(); }

TEST_P(AttentionTest, ThreadsDoNotChangeABit) {
  Threads one(1);
  Problem<float> expected(GetParam());
  expected.forward(one);
  expected.backward(one);
  for (int n : {2, 3, 7}) {
    Threads threads(n);
    Problem<float> p(GetParam());
    p.forward(threads);
    p.backward(threads);
    EXPECT_TRUE(Bitwise(p.o.in(), expected.o.in())) << n;
    EXPECT_TRUE(Bitwise(p.lse.in(), expected.lse.in())) << n;
    EXPECT_TRUE(Bitwise(p.dq.in(), expected.dq.in())) << n;
    EXPECT_TRUE(Bitwise(p.dk.in(), expected.dk.in())) << n;
    EXPECT_TRUE(Bitwise(p.dv.in(), expected.dv.in())) << n;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionTest,
                         testing::ValuesIn(attention_cases()),
                         [](const auto& info) { return info.param.name; });

AttentionCase find(const std::string& name) {
  for (const AttentionCase& c : attention_cases()) {
    if (c.name == name) return c;
  }
  ADD_FAILURE() << "no case " << name;
  return {};
}

TEST(Attention, WorkersTakeTilesAndGiveTheSameBits) {
  Problem<float> p(find("GroupedHeads"));
  EXPECT_TRUE(SameForAnyThreads(p.o, [&](Launch l) { p.forward(l); }));
  EXPECT_TRUE(SameForAnyThreads(p.dq, [&](Launch l) { p.backward(l); }));
  EXPECT_TRUE(SameForAnyThreads(p.dk, [&](Launch l) { p.backward(l); }));
  EXPECT_TRUE(SameForAnyThreads(p.dv, [&](Launch l) { p.backward(l); }));
}

TEST(Attention, RowWithoutKeysIsZeroWithInfiniteLse) {
  Problem<float> p(find("EmptyRanges"));
  p.forward(launch());
  p.backward(launch());
  for (int64_t t : {0, 2, 3}) {
    for (int64_t h = 0; h < p.c.heads; ++h) {
      EXPECT_EQ(p.lse.view()(t, h), std::numeric_limits<float>::infinity());
      for (int64_t i = 0; i < p.c.v_dim; ++i) {
        EXPECT_EQ(p.o.view()(t, h, i), 0);
        EXPECT_EQ(p.dq.view()(t, h, i), 0);
      }
    }
  }
  for (int64_t s : {0, 4, 5}) {  // keys that no row sees
    for (int64_t i = 0; i < p.c.qk_dim; ++i) {
      EXPECT_EQ(p.dk.view()(s, 0, i), 0);
      EXPECT_EQ(p.dv.view()(s, 0, i), 0);
    }
  }
}

// Poison in one token's q, k, v and do reaches what depends on it, and nothing
// else changes by a bit.
TEST(Attention, NanStaysWithTheRowsThatSeeIt) {
  for (const char* name : {"Window", "GroupedHeads"}) {
    const AttentionCase c = find(name);
    Problem<float> clean(c), p(c);
    const int64_t bad = 40;
    for (int64_t i = 0; i < c.qk_dim; ++i) {
      for (int64_t h = 0; h < c.heads; ++h) p.q.view()(bad, h, i) = NAN;
      for (int64_t g = 0; g < c.groups; ++g) p.k.view()(bad, g, i) = NAN;
    }
    for (int64_t i = 0; i < c.v_dim; ++i) {
      for (int64_t h = 0; h < c.heads; ++h) p.dout.view()(bad, h, i) = NAN;
      for (int64_t g = 0; g < c.groups; ++g) p.v.view()(bad, g, i) = NAN;
    }
    clean.forward(launch());
    clean.backward(launch());
    p.forward(launch());
    p.backward(launch());
    std::vector<bool> touched_key(c.keys);
    for (int64_t t = 0; t < c.tokens(); ++t) {
      const auto [first, last] = c.range[t];
      const bool sees = (first <= bad && bad < last) || t == bad;
      for (int64_t s = first; s < last; ++s) {
        touched_key[s] = touched_key[s] || sees;
      }
      for (int64_t h = 0; h < c.heads; ++h) {
        EXPECT_EQ(std::isnan(p.o.view()(t, h, 0)), sees) << t;
        EXPECT_EQ(std::isnan(p.dq.view()(t, h, 0)), sees) << t;
        if (sees) continue;
        EXPECT_EQ(p.o.view()(t, h, 0), clean.o.view()(t, h, 0)) << t;
        EXPECT_EQ(p.dq.view()(t, h, 0), clean.dq.view()(t, h, 0)) << t;
      }
    }
    for (int64_t s = 0; s < c.keys; ++s) {
      EXPECT_EQ(std::isnan(p.dk.view()(s, 0, 0)), touched_key[s]) << s;
      EXPECT_EQ(std::isnan(p.dv.view()(s, 0, 0)), touched_key[s]) << s;
    }
  }
}

// Decoding with a cache gives what the whole sequence gave.
TEST(Attention, RowAloneHasTheBitsItHasAmongOthers) {
  for (const char* name : {"ThreeHeadsPerGroup", "ScatteredRanges"}) {
    Problem<float> whole(find(name));
    whole.forward(launch());
    for (int64_t t = 0; t < whole.c.tokens(); ++t) {
      AttentionCase one = whole.c;
      one.range = {whole.c.range[t]};
      Problem<float> p(one);
      for (int64_t h = 0; h < one.heads; ++h) {
        for (int64_t i = 0; i < one.qk_dim; ++i) {
          p.q.view()(0, h, i) = whole.q.view()(t, h, i);
        }
      }
      p.forward(launch());
      EXPECT_TRUE(Bitwise(p.lse.in()[0], whole.lse.in()[t])) << t;
      EXPECT_TRUE(Bitwise(p.o.in()[0], whole.o.in()[t])) << t;
    }
  }
}

// Buffers hold bf16 values, whose sums are exact in any order; thirds are not.
std::vector<double> thirds(std::vector<double> values) {
  for (double& x : values) x /= 3;
  return values;
}

// All rows see one key, so p = 1 and dv is the sum of all do, in f32.
TEST(Attention, KeyGradientsAddQueriesAndThenHeadsInAscendingOrder) {
  AttentionCase c{"", 6, 2, 3, 5, 2, {}, 0.5};
  c.range.assign(90, {1, 2});
  Problem<float> p(c);
  p.dout.set(thirds(p.dout.values()));
  p.forward(launch());
  p.backward(launch());
  for (int64_t g = 0; g < c.groups; ++g) {
    for (int64_t i = 0; i < c.v_dim; ++i) {
      float sum = 0;
      for (int64_t t = 0; t < c.tokens(); ++t) {
        for (int64_t h = 3 * g; h < 3 * g + 3; ++h) {
          sum += p.dout.view()(t, h, i);
        }
      }
      EXPECT_EQ(p.dv.view()(1, g, i), sum) << g << " " << i;
    }
  }
}

TEST(Attention, GradientsEqualFiniteDifferences) {
  for (const char* name : {"SmallOdd", "SequencesOfOne", "EmptyRanges"}) {
    Problem<double> p(find(name));
    p.forward(launch());
    p.backward(launch());
    const auto loss = [&] {
      p.forward(launch());
      return inner_product(p.o, p.dout);
    };
    EXPECT_TRUE(Close(flat(p.dq), numeric_gradient(p.q, loss))) << name;
    EXPECT_TRUE(Close(flat(p.dk), numeric_gradient(p.k, loss))) << name;
    EXPECT_TRUE(Close(flat(p.dv), numeric_gradient(p.v, loss))) << name;
  }
}

TEST(KeyRange, FollowsPackedSequences) {
  const std::vector<int32_t> cu = {0, 2, 2, 5};
  std::vector<int32_t> begin(5, -7), end(5, -7);
  key_ranges_from_cu_seqlens(view_of(cu, {4}), view_of(begin, {5}),
                             view_of(end, {5}));
  EXPECT_EQ(begin, (std::vector<int32_t>{0, 0, 2, 2, 2}));
  EXPECT_EQ(end, (std::vector<int32_t>{1, 2, 3, 4, 5}));
}

TEST(KeyRangeDeathTest, RefusesSequencesThatDoNotCoverTheRows) {
  const std::vector<int32_t> cu = {0, 4};
  std::vector<int32_t> begin(5), end(5);
  EXPECT_DEATH(key_ranges_from_cu_seqlens(view_of(cu, {2}), view_of(begin, {5}),
                                          view_of(end, {5})),
               "key_range.*4 vs 5");
}

TEST(AttentionDeathTest, NamesTheShapesThatDisagree) {
  Problem<float> p(find("SmallOdd"));
  const Buffer<float> k({7, 1, 6});
  EXPECT_DEATH(
      attention_forward<float>(launch(), p.q.in(), k.in(), p.v.in(), p.range(),
                               1.0, p.o.view(), p.lse.view()),
      "\\[attention\\].*f32\\[7, 3, 5\\].*\\[7, 1, 6\\]");
}

// On the CPU: a device's ranges are not the host's to read.
TEST(AttentionDeathTest, RefusesRangesPastTheLastKey) {
  Threads threads(1);
  Problem<float> p(find("SmallOdd"));
  p.end.view()(6) = 8;
  EXPECT_DEATH(p.forward(threads), "row 6 sees keys \\[3, 8\\) of 7");
}

}  // namespace
}  // namespace tapeline
