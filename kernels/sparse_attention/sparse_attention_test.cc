#include "kernels/sparse_attention/sparse_attention.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/sparse_attention/sparse_attention_cases.h"
#include "tests/support/buffer.h"
#include "tests/support/close.h"
#include "tests/support/finite_differences.h"
#include "tests/support/fixture.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

// Inputs and outputs of one case, strided, outputs and workspace poisoned.
template <class T>
struct Problem {
  explicit Problem(const SparseAttentionCase& test_case, int64_t gap = 3)
      : c(test_case),
        q({c.tokens, c.heads, c.dim}, gap),
        kv({c.keys, c.dim}, gap),
        dout({c.tokens, c.heads, c.v_dim}, gap),
        o({c.tokens, c.heads, c.v_dim}, gap),
        dq({c.tokens, c.heads, c.dim}, gap),
        dkv({c.keys, c.dim}, gap),
        lse({c.tokens, c.heads}, gap),
        ids({c.tokens, c.selected}, gap),
        offsets({c.keys + 1}),
        entries({c.tokens * c.selected + 5}),
        // For whichever side runs.
        workspace({std::max(workspace_elements(launch()),
                            workspace_elements(Launch{}))}) {
    q.normal(1);
    kv.normal(2);
    dout.normal(3);
    ids.set(std::vector<double>(c.ids.begin(), c.ids.end()));
  }
  int64_t workspace_elements(const Launch& l) const {
    return static_cast<int64_t>(
        sparse_attention_backward_workspace_bytes<T>(
            l, q.in(), kv.in(), ids.in(), o.in(), c.scale) /
        sizeof(Accumulator<T>));
  }
  void forward(Launch l) {
    sparse_attention_forward<T>(l, q.in(), kv.in(), ids.in(), c.scale, o.view(),
                                lse.view());
  }
  void backward(Launch l) {
    invert_ids(l, ids.in(), offsets.view(), entries.view());
    workspace.poison();
    sparse_attention_backward<T>(
        l, dout.in(), q.in(), kv.in(), ids.in(), o.in(), lse.in(), offsets.in(),
        entries.in(), c.scale, dq.view(), dkv.view(),
        reinterpret_cast<std::byte*>(workspace.view().data));
  }

  SparseAttentionCase c;
  Buffer<T> q, kv, dout, o, dq, dkv;
  Buffer<Accumulator<T>> lse;
  Buffer<int32_t> ids, offsets, entries;
  Buffer<Accumulator<T>> workspace;
};

// The definition in f64 with the selection as a count per key: no ids, no
// tiles. `rounded_o` is what the backward is given.
struct Expected {
  std::vector<double> o, lse, dq, dkv;
};
Expected by_definition(const SparseAttentionCase& c,
                       const std::vector<double>& q,
                       const std::vector<double>& kv,
                       const std::vector<double>& dout,
                       const std::vector<double>& rounded_o) {
  const int64_t H = c.heads, D = c.dim, V = c.v_dim;
  Expected e;
  e.o.assign(c.tokens * H * V, 0);
  e.lse.assign(c.tokens * H, std::numeric_limits<double>::infinity());
  e.dq.assign(q.size(), 0);
  e.dkv.assign(kv.size(), 0);
  for (int64_t t = 0; t < c.tokens; ++t) {
    std::vector<int> times(c.keys);
    for (int64_t j = 0; j < c.selected; ++j) {
      const int32_t id = c.ids[t * c.selected + j];
      if (id >= 0) ++times[id];
    }
    for (int64_t h = 0; h < H; ++h) {
      const double* qr = &q[(t * H + h) * D];
      const double* dor = &dout[(t * H + h) * V];
      double total = 0, delta = 0;
      std::vector<double> p(c.keys), dp(c.keys);
      for (int64_t s = 0; s < c.keys; ++s) {
        double score = 0;
        for (int64_t d = 0; d < D; ++d) score += qr[d] * kv[s * D + d];
        for (int64_t i = 0; i < V; ++i) dp[s] += dor[i] * kv[s * D + i];
        p[s] = times[s] * std::exp(score * c.scale);
        total += p[s];
      }
      if (total == 0) continue;
      e.lse[t * H + h] = std::log(total);
      for (int64_t i = 0; i < V; ++i) {
        delta += dor[i] * rounded_o[(t * H + h) * V + i];
      }
      for (int64_t s = 0; s < c.keys; ++s) {
        p[s] /= total;
        const double ds = p[s] * (dp[s] - delta) * c.scale;
        for (int64_t i = 0; i < V; ++i) {
          e.o[(t * H + h) * V + i] += p[s] * kv[s * D + i];
          e.dkv[s * D + i] += p[s] * dor[i];
        }
        for (int64_t d = 0; d < D; ++d) {
          e.dq[(t * H + h) * D + d] += ds * kv[s * D + d];
          e.dkv[s * D + d] += ds * qr[d];
        }
      }
    }
  }
  return e;
}

template <class T>
std::vector<T> flat(const Buffer<T>& x) {
  std::vector<T> out;
  for (double v : x.values()) out.push_back(T(v));
  return out;
}

class SparseAttentionTest : public testing::TestWithParam<SparseAttentionCase> {
 protected:
  template <class T>
  void expect_definition() {
    Problem<T> p(GetParam());
    const SparseAttentionCase& c = p.c;
    p.forward(launch());
    p.backward(launch());
    const Expected e = by_definition(c, p.q.values(), p.kv.values(),
                                     p.dout.values(), p.o.values());
    const int64_t terms = c.dim + c.selected;
    const auto view = [](const std::vector<double>& x, const Shape& shape) {
      return View<const double>(x.data(), shape);
    };
    EXPECT_TRUE(Close(p.o.in(), view(e.o, p.o.in().shape), {terms}));
    EXPECT_TRUE(Close(p.lse.in(), view(e.lse, p.lse.in().shape), {terms}));
    // Against the size of the whole tensor: the dq of a row with one key is a
    // difference of equal numbers.
    const int64_t pairs = terms + c.v_dim + c.tokens * c.heads;
    EXPECT_TRUE(Close(flat(p.dq), e.dq, {pairs}));
    EXPECT_TRUE(Close(flat(p.dkv), e.dkv, {pairs}));
    EXPECT_TRUE(p.o.guards_intact());
    EXPECT_TRUE(p.lse.guards_intact());
    EXPECT_TRUE(p.dq.guards_intact());
    EXPECT_TRUE(p.dkv.guards_intact());
    EXPECT_TRUE(p.offsets.guards_intact());
    EXPECT_TRUE(p.entries.guards_intact());
    EXPECT_TRUE(p.workspace.guards_intact());
  }
};

TEST_P(SparseAttentionTest, EqualsTheDefinitionInF32) {
  expect_definition<float>();
}
TEST_P(SparseAttentionTest, EqualsTheDefinitionInF64) {
  expect_definition<double>();
}
TEST_P(SparseAttentionTest, EqualsTheDefinitionInBf16) {
  expect_definition<bf16>();
}

TEST_P(SparseAttentionTest, InverseListsEveryChoiceInOrder) {
  Problem<float> p(GetParam());
  invert_ids(launch(), p.ids.in(), p.offsets.view(), p.entries.view());
  std::vector<int32_t> entries, offsets = {0};
  for (int32_t s = 0; s < p.c.keys; ++s) {
    for (size_t e = 0; e < p.c.ids.size(); ++e) {
      if (p.c.ids[e] == s) entries.push_back(static_cast<int32_t>(e));
    }
    offsets.push_back(static_cast<int32_t>(entries.size()));
  }
  const std::vector<double> got = p.entries.values();
  EXPECT_EQ(std::vector<int32_t>(got.begin(), got.begin() + entries.size()),
            entries);
  EXPECT_EQ(flat(p.offsets), offsets);
  for (size_t i = entries.size(); i < got.size(); ++i) {
    EXPECT_GT(got[i], 1e9) << "entry " << i << " was written";
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, SparseAttentionTest,
                         testing::ValuesIn(sparse_attention_cases()),
                         [](const auto& info) { return info.param.name; });

SparseAttentionCase find(const std::string& name) {
  for (const SparseAttentionCase& c : sparse_attention_cases()) {
    if (c.name == name) return c;
  }
  ADD_FAILURE() << "no case " << name;
  return {};
}

// Computed in f64 by torch from bf16 inputs: absorbed MLA, 576 wide, two packed
// sequences, ids in random order.
template <class T>
void expect_golden() {
  const Fixture golden = Fixture::open("tests/data/ops/sparse_mla.safetensors");
  const Shape q = golden.shape("q"), ids = golden.shape("ids");
  SparseAttentionCase c{"golden", q[0],   q[0],
                        q[1],     q[2],   golden.shape("out")[2],
                        ids[1],   0.0625, golden.ints("ids")};
  Problem<T> p(c);
  p.q.set(golden.values("q"));
  p.kv.set(golden.values("kv"));
  p.dout.set(golden.values("dout"));
  p.forward(launch());
  p.backward(launch());
  const auto view = [&](const std::vector<float>& x, const char* name) {
    return View<const float>(x.data(), golden.shape(name));
  };
  const std::vector<float> o = golden.floats("out"), lse = golden.floats("lse"),
                           dkv = golden.floats("dkv");
  const int64_t terms = c.dim + c.selected;
  EXPECT_TRUE(Close(p.o.in(), view(o, "out"), {terms}));
  EXPECT_TRUE(Close(p.lse.in(), view(lse, "lse"), {terms}));
  const int64_t pairs = terms + c.v_dim + c.tokens * c.heads;
  // In bf16 the gradients follow from an o that is rounded, which the golden
  // ones do not know: EqualsTheDefinitionInBf16 has them.
  if constexpr (std::is_same_v<T, bf16>) return;
  EXPECT_TRUE(Close(flat(p.dq), golden.floats("dq"), {pairs}));
  EXPECT_TRUE(Close(p.dkv.in(), view(dkv, "dkv"), {pairs}));
}
TEST(SparseAttention, EqualsGoldenValuesInF32) { expect_golden<float>(); }
TEST(SparseAttention, EqualsGoldenValuesInF64) { expect_golden<double>(); }
TEST(SparseAttention, EqualsGoldenValuesInBf16) { expect_golden<bf16>(); }

TEST(SparseAttention, ThreadsDoNotChangeABit) {
  for (const char* name : {"Training", "ManyKeys"}) {
    Problem<float> p(find(name));
    const auto forward = [&](Launch l) { p.forward(l); };
    const auto backward = [&](Launch l) { p.backward(l); };
    EXPECT_TRUE(SameForAnyThreads(p.o, forward)) << name;
    EXPECT_TRUE(SameForAnyThreads(p.lse, forward)) << name;
    EXPECT_TRUE(SameForAnyThreads(p.dq, backward)) << name;
    EXPECT_TRUE(SameForAnyThreads(p.dkv, backward)) << name;
  }
}

TEST(SparseAttention, RowWithoutKeysIsZeroWithInfiniteLse) {
  Problem<float> p(find("SomeRowsEmpty"));
  p.forward(launch());
  p.backward(launch());
  for (int64_t t : {0, 2}) {
    for (int64_t h = 0; h < p.c.heads; ++h) {
      EXPECT_EQ(p.lse.view()(t, h), std::numeric_limits<float>::infinity());
      for (int64_t i = 0; i < p.c.v_dim; ++i) {
        EXPECT_EQ(p.o.view()(t, h, i), 0);
      }
      for (int64_t i = 0; i < p.c.dim; ++i) EXPECT_EQ(p.dq.view()(t, h, i), 0);
    }
  }
  for (int64_t s : {1, 2, 4}) {  // keys that nobody chose
    for (int64_t i = 0; i < p.c.dim; ++i) EXPECT_EQ(p.dkv.view()(s, i), 0);
  }
}

TEST(SparseAttention, PlaceOfPaddingDoesNotChangeABit) {
  SparseAttentionCase behind = find("PaddingBetween");
  Problem<float> between(behind);
  for (int64_t t = 0; t < behind.tokens; ++t) {
    const auto row = behind.ids.begin() + t * behind.selected;
    std::stable_partition(row, row + behind.selected,
                          [](int32_t id) { return id >= 0; });
  }
  Problem<float> compact(behind);
  between.forward(launch());
  between.backward(launch());
  compact.forward(launch());
  compact.backward(launch());
  EXPECT_TRUE(Bitwise(between.o.in(), compact.o.in()));
  EXPECT_TRUE(Bitwise(between.lse.in(), compact.lse.in()));
  EXPECT_TRUE(Bitwise(between.dq.in(), compact.dq.in()));
  EXPECT_TRUE(Bitwise(between.dkv.in(), compact.dkv.in()));
}

// All queries choose one key, so p = 1, and with one column ds = 0: dkv is the
// sum of all do, in f32.
TEST(SparseAttention, KeyGradientsAddQueriesAndThenHeadsInAscendingOrder) {
  SparseAttentionCase c{"", 500, 20, 3, 1, 1, 1, 0.5};
  c.ids.assign(c.tokens, 17);
  Problem<float> p(c);
  // bf16 values, which buffers are filled with, have exact sums in any order.
  std::vector<double> thirds = p.dout.values();
  for (double& x : thirds) x /= 3;
  p.dout.set(thirds);
  p.forward(launch());
  p.backward(launch());
  float sum = 0;
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t h = 0; h < c.heads; ++h) sum += p.dout.view()(t, h, 0);
  }
  EXPECT_EQ(p.dkv.view()(17, 0), sum);
}

TEST(SparseAttention, KeysThatNobodyChoseAreNotRead) {
  Problem<float> clean(find("AnyKeys")), p(find("AnyKeys"));
  for (int64_t s : {1, 2, 5, 6, 7}) {
    for (int64_t d = 0; d < p.c.dim; ++d) p.kv.view()(s, d) = NAN;
  }
  for (Problem<float>* each : {&clean, &p}) {
    each->forward(launch());
    each->backward(launch());
  }
  EXPECT_TRUE(Bitwise(p.o.in(), clean.o.in()));
  EXPECT_TRUE(Bitwise(p.dq.in(), clean.dq.in()));
  EXPECT_TRUE(Bitwise(p.dkv.in(), clean.dkv.in()));
}

TEST(SparseAttention, GradientsEqualFiniteDifferences) {
  for (const char* name : {"SmallOdd", "SomeRowsEmpty", "AnyKeys"}) {
    Problem<double> p(find(name));
    p.forward(launch());
    p.backward(launch());
    const auto loss = [&] {
      p.forward(launch());
      return inner_product(p.o, p.dout);
    };
    EXPECT_TRUE(Close(flat(p.dq), numeric_gradient(p.q, loss))) << name;
    EXPECT_TRUE(Close(flat(p.dkv), numeric_gradient(p.kv, loss))) << name;
  }
}

// On the CPU: a device's ids are not the host's to read.
TEST(SparseAttentionDeathTest, RefusesIdsThatAreNoKeys) {
  Threads threads(1);
  Problem<float> p(find("SmallOdd"));
  p.ids.view()(5, 1) = 7;
  EXPECT_DEATH(p.forward(threads), "1 ids of a row are no key in \\[0, 7\\)");
  p.ids.view()(5, 1) = -2;
  EXPECT_DEATH(p.forward(threads), "1 ids of a row are no key in \\[0, 7\\)");
  EXPECT_DEATH(
      invert_ids(threads, p.ids.in(), p.offsets.view(), p.entries.view()),
      "\\[invert_ids\\] 1 ids of a row");
}

TEST(SparseAttentionDeathTest, NamesTheShapesThatDisagree) {
  Problem<float> p(find("SmallOdd"));
  const Buffer<float> kv({7, 6});
  EXPECT_DEATH(
      sparse_attention_forward<float>(launch(), p.q.in(), kv.in(), p.ids.in(),
                                      1.0, p.o.view(), p.lse.view()),
      "\\[sparse_attention\\] shapes: q is f32\\[7, 3, 5\\].*"
      "f32\\[7, 6\\]");
}

}  // namespace
}  // namespace tapeline
