#include "kernels/indexer_loss/indexer_loss.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/indexer_loss/indexer_loss_cases.h"
#include "kernels/sparse_attention/sparse_attention.h"
#include "tests/support/buffer.h"
#include "tests/support/close.h"
#include "tests/support/finite_differences.h"
#include "tests/support/fixture.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

// Inputs and outputs of one case, strided, outputs poisoned.
template <class T>
struct Problem {
  using A = Accumulator<T>;
  explicit Problem(const IndexerLossCase& test_case, int64_t gap = 3)
      : c(test_case),
        T_(c.attention.tokens),
        S(c.attention.keys),
        K(c.attention.selected),
        qi({T_, c.index_heads, c.index_dim}, gap),
        ki({S, c.index_dim}, gap),
        q({T_, c.attention.heads, c.attention.dim}, gap),
        kv({S, c.attention.dim}, gap),
        o({T_, c.attention.heads, c.attention.v_dim}),
        dqi({T_, c.index_heads, c.index_dim}, gap),
        dki({S, c.index_dim}, gap),
        w({T_, c.index_heads}, gap),
        lse({T_, c.attention.heads}, gap),
        loss({T_}),
        dloss({T_}),
        dscore({T_, K}, gap),
        dw({T_, c.index_heads}, gap),
        ids({T_, K}, gap),
        offsets({S + 1}),
        entries({T_ * K}),
        // For whichever side runs.
        workspace({static_cast<int64_t>(
            std::max(workspace_bytes(launch()), workspace_bytes(Launch{})))}) {
    qi.normal(1);
    ki.normal(2);
    w.normal(3);
    q.normal(4);
    kv.normal(5);
    dloss.normal(6);
    ids.set(
        std::vector<double>(c.attention.ids.begin(), c.attention.ids.end()));
    sparse_attention_forward<T>(launch(), q.in(), kv.in(), ids.in(),
                                c.attention.scale, o.view(), lse.view());
    invert_ids(launch(), ids.in(), offsets.view(), entries.view());
  }
  size_t workspace_bytes(const Launch& l) const {
    return indexer_loss_backward_workspace_bytes<T>(l, qi.in(), ki.in(),
                                                    ids.in(), c.index_scale);
  }
  void forward(Launch l) {
    indexer_loss_forward<T>(l, qi.in(), ki.in(), w.in(), c.index_scale, q.in(),
                            kv.in(), lse.in(), c.attention.scale, ids.in(),
                            loss.view(), dscore.view());
  }
  void backward(Launch l) {
    indexer_loss_backward<T>(l, dscore.in(), dloss.in(), qi.in(), ki.in(),
                             w.in(), c.index_scale, ids.in(), offsets.in(),
                             entries.in(), dqi.view(), dki.view(), dw.view(),
                             bytes());
  }
  std::byte* bytes() {
    return reinterpret_cast<std::byte*>(workspace.view().data);
  }

  IndexerLossCase c;
  int64_t T_, S, K;
  Buffer<T> qi, ki, q, kv, o, dqi, dki;
  Buffer<A> w, lse, loss, dloss, dscore, dw;
  Buffer<int32_t> ids, offsets, entries;
  Buffer<uint8_t> workspace;
};

// The definition in f64: for each row, a softmax over its list of valid slots.
struct Expected {
  std::vector<double> loss, dscore, dqi, dki, dw;
};
template <class T>
Expected by_definition(const Problem<T>& p) {
  const int64_t Hi = p.c.index_heads, Di = p.c.index_dim;
  const int64_t H = p.c.attention.heads, D = p.c.attention.dim;
  const std::vector<double> qi = p.qi.values(), ki = p.ki.values(),
                            q = p.q.values(), kv = p.kv.values(),
                            w = p.w.values(), dloss = p.dloss.values();
  Expected e;
  e.dqi.assign(qi.size(), 0);
  e.dki.assign(ki.size(), 0);
  e.dw.assign(w.size(), 0);
  for (int64_t t = 0; t < p.T_; ++t) {
    std::vector<int64_t> keys;
    for (int64_t j = 0; j < p.K; ++j) {
      const int32_t id = p.c.attention.ids[t * p.K + j];
      if (id >= 0) keys.push_back(id);
    }
    const size_t n = keys.size();
    std::vector<double> target(n), score(n);
    for (int64_t h = 0; h < H; ++h) {
      std::vector<double> weight(n);
      double total = 0;
      for (size_t j = 0; j < n; ++j) {
        double dot = 0;
        for (int64_t d = 0; d < D; ++d) {
          dot += q[(t * H + h) * D + d] * kv[keys[j] * D + d];
        }
        total += weight[j] = std::exp(dot * p.c.attention.scale);
      }
      for (size_t j = 0; j < n; ++j) target[j] += weight[j] / total / H;
    }
    std::vector<std::vector<double>> x(n, std::vector<double>(Hi));
    double total = 0;
    for (size_t j = 0; j < n; ++j) {
      for (int64_t h = 0; h < Hi; ++h) {
        for (int64_t d = 0; d < Di; ++d) {
          x[j][h] += qi[(t * Hi + h) * Di + d] * ki[keys[j] * Di + d];
        }
        x[j][h] *= p.c.index_scale;
        score[j] += w[t * Hi + h] * std::max(x[j][h], 0.0);
      }
      total += std::exp(score[j]);
    }
    double loss = 0;
    std::vector<double> gradient(n);
    for (size_t j = 0; j < n; ++j) {
      const double model = std::exp(score[j]) / total;
      if (target[j] > 0) loss += target[j] * std::log(target[j] / model);
      gradient[j] = model - target[j];
      for (int64_t h = 0; h < Hi; ++h) {
        if (x[j][h] <= 0) continue;
        const double g = dloss[t] * gradient[j];
        e.dw[t * Hi + h] += g * x[j][h];
        for (int64_t d = 0; d < Di; ++d) {
          const double ds = g * w[t * Hi + h] * p.c.index_scale;
          e.dqi[(t * Hi + h) * Di + d] += ds * ki[keys[j] * Di + d];
          e.dki[keys[j] * Di + d] += ds * qi[(t * Hi + h) * Di + d];
        }
      }
    }
    e.loss.push_back(loss);
    size_t next = 0;
    for (int64_t j = 0; j < p.K; ++j) {
      const bool valid = p.c.attention.ids[t * p.K + j] >= 0;
      e.dscore.push_back(valid ? gradient[next++] : 0);
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

class IndexerLossTest : public testing::TestWithParam<IndexerLossCase> {
 protected:
  // Everything against the size of the whole tensor: losses and their gradients
  // are differences, of rows with one key of equal numbers.
  template <class T>
  void expect_definition(int64_t gap = 3) {
    Problem<T> p(GetParam(), gap);
    p.forward(launch());
    p.backward(launch());
    const Expected e = by_definition(p);
    const int64_t terms =
        16 * (p.K + p.c.index_heads * p.c.index_dim + p.c.attention.dim);
    EXPECT_TRUE(Close(flat(p.loss), e.loss, {terms}));
    EXPECT_TRUE(Close(flat(p.dscore), e.dscore, {terms}));
    EXPECT_TRUE(Close(flat(p.dqi), e.dqi, {terms + p.T_}));
    EXPECT_TRUE(Close(flat(p.dki), e.dki, {terms + p.T_}));
    EXPECT_TRUE(Close(flat(p.dw), e.dw, {terms + p.T_}));
    EXPECT_TRUE(p.loss.guards_intact());
    EXPECT_TRUE(p.dscore.guards_intact());
    EXPECT_TRUE(p.dqi.guards_intact());
    EXPECT_TRUE(p.dki.guards_intact());
    EXPECT_TRUE(p.dw.guards_intact());
    const std::vector<double> dscore = p.dscore.values();
    for (size_t i = 0; i < dscore.size(); ++i) {
      EXPECT_TRUE(p.c.attention.ids[i] >= 0 || dscore[i] == 0) << i;
    }
  }
};

TEST_P(IndexerLossTest, EqualsTheDefinitionInF32) {
  expect_definition<float>();
}
TEST_P(IndexerLossTest, EqualsTheDefinitionInF64) {
  expect_definition<double>();
}
TEST_P(IndexerLossTest, EqualsTheDefinitionInBf16) {
  expect_definition<bf16>();
}
// As a fast path wants them.
TEST_P(IndexerLossTest, EqualsTheDefinitionInBf16WithAlignedRows) {
  expect_definition<bf16>(8);
}

INSTANTIATE_TEST_SUITE_P(Cases, IndexerLossTest,
                         testing::ValuesIn(indexer_loss_cases()),
                         [](const auto& info) {
                           return info.param.attention.name;
                         });

IndexerLossCase find(const std::string& name) {
  for (const IndexerLossCase& c : indexer_loss_cases()) {
    if (c.attention.name == name) return c;
  }
  ADD_FAILURE() << "no case " << name;
  return {};
}

TEST(IndexerLoss, ThreadsDoNotChangeABit) {
  Problem<float> p(find("Training"));
  const auto forward = [&](Launch l) { p.forward(l); };
  const auto backward = [&](Launch l) { p.backward(l); };
  EXPECT_TRUE(SameForAnyThreads(p.loss, forward));
  EXPECT_TRUE(SameForAnyThreads(p.dscore, forward));
  EXPECT_TRUE(SameForAnyThreads(p.dqi, backward));
  EXPECT_TRUE(SameForAnyThreads(p.dki, backward));
  EXPECT_TRUE(SameForAnyThreads(p.dw, backward));
}

TEST(IndexerLoss, GradientsEqualFiniteDifferences) {
  for (const char* name : {"SmallOdd", "SomeRowsEmpty", "AnyKeys"}) {
    Problem<double> p(find(name));
    p.forward(launch());
    p.backward(launch());
    const auto loss = [&] {
      p.forward(launch());
      return inner_product(p.loss, p.dloss);
    };
    EXPECT_TRUE(Close(flat(p.dqi), numeric_gradient(p.qi, loss))) << name;
    EXPECT_TRUE(Close(flat(p.dki), numeric_gradient(p.ki, loss))) << name;
    EXPECT_TRUE(Close(flat(p.dw), numeric_gradient(p.w, loss))) << name;
  }
}

// All queries choose one key, ds = 1: dk is the sum of all q, in f32.
TEST(IndexerLoss, KeyGradientsAddQueriesAndThenHeadsInAscendingOrder) {
  IndexerLossCase c{3, 1, 1.0, {"", 3000, 20, 1, 1, 1, 1, 0.5}};
  c.attention.ids.assign(c.attention.tokens, 17);
  Problem<float> p(c);
  // Thirds: bf16 values, which buffers are filled with, have exact sums in any
  // order.
  std::vector<double> positive = p.qi.values();
  for (double& x : positive) x = (std::abs(x) + 1) / 3;
  p.qi.set(positive);
  p.ki.set(std::vector<double>(20, 1));
  p.w.set(std::vector<double>(p.T_ * 3, 1));
  p.dscore.set(std::vector<double>(p.T_, 1));
  p.dloss.set(std::vector<double>(p.T_, 1));
  p.backward(launch());
  float sum = 0;
  for (double x : p.qi.values()) sum += static_cast<float>(x);
  EXPECT_EQ(p.dki.view()(17, 0), sum);
}

TEST(IndexerLoss, OneWeightForAllRowsMayHaveStrideZero) {
  Problem<float> p(find("SmallOdd"));
  p.forward(launch());
  p.dloss.set(std::vector<double>(p.T_, 0.25));
  p.backward(launch());
  const std::vector<double> dqi = p.dqi.values(), dki = p.dki.values();
  p.dqi.poison();
  p.dki.poison();
  Buffer<float> weight({1});
  weight.set({0.25});
  indexer_loss_backward<float>(
      launch(), p.dscore.in(), View<const float>(weight.in().data, {p.T_}, {0}),
      p.qi.in(), p.ki.in(), p.w.in(), p.c.index_scale, p.ids.in(),
      p.offsets.in(), p.entries.in(), p.dqi.view(), p.dki.view(), p.dw.view(),
      p.bytes());
  EXPECT_EQ(p.dqi.values(), dqi);
  EXPECT_EQ(p.dki.values(), dki);
}

// An lse over more keys than the selected makes probabilities that do not add
// up to 1; one that is far off, none.
TEST(IndexerLoss, TargetIsNormalisedOverTheRow) {
  Problem<float> p(find("SmallOdd")), wider(find("SmallOdd"));
  p.forward(launch());
  std::vector<double> lse = p.lse.values();
  for (double& x : lse) x += 1;
  wider.lse.set(lse);
  wider.forward(launch());
  EXPECT_TRUE(Close(flat(wider.dscore), flat(p.dscore), {1000}));
  EXPECT_TRUE(Close(flat(wider.loss), flat(p.loss), {1000}));
  for (double& x : lse) x += 1000;
  wider.lse.set(lse);
  wider.forward(launch());
  for (double x : wider.loss.values()) EXPECT_EQ(x, 0);
  for (double x : wider.dscore.values()) EXPECT_TRUE(x >= 0 && x <= 1) << x;
}

// A score far above the others leaves probabilities that round to 0; a target
// of 0 costs nothing.
TEST(IndexerKl, StaysFiniteAtTheEnds) {
  Buffer<float> scores({3, 3}), target({3, 3}), loss({3}), dscore({3, 3});
  Buffer<int32_t> ids({3, 3});
  scores.set({0, 500, 1, 7, 7, 7, 1, 2, 3});
  target.set({1, 0, 0, 0, 0, 1, 0.5, 0.25, 0.25});
  ids.set({4, 5, 6, 1, -1, 0, -1, -1, -1});
  indexer_kl<float>(launch(), scores.in(), target.in(), ids.in(), loss.view(),
                    dscore.view());
  const std::vector<double> l = loss.values();
  EXPECT_NEAR(l[0], 500, 1e-3);
  EXPECT_NEAR(l[1], std::log(2.0), 1e-6);
  EXPECT_EQ(l[2], 0);
  EXPECT_EQ(dscore.values(),
            (std::vector<double>{-1, 1, 0, 0.5, 0, -0.5, 0, 0, 0}));
}

// Computed in f64 by torch from bf16 inputs: a random target over the selected
// keys, the mean over rows; w is before its factor of heads^-0.5.
TEST(IndexerLoss, EqualsGoldenValuesForAGivenTarget) {
  const Fixture golden = Fixture::open("tests/data/ops/indexer.safetensors");
  const Shape q = golden.shape("q");
  const int64_t T = q[0], H = q[1], D = q[2], K = golden.shape("ids")[1];
  const double head_scale = 1 / std::sqrt(static_cast<double>(H));
  Buffer<float> qi({T, H, D}), ki({T, D}), w({T, H}), scores({T, K}),
      target({T, K}), loss({T}), dscore({T, K}), dqi({T, H, D}), dki({T, D}),
      dw({T, H});
  Buffer<int32_t> ids({T, K}), offsets({T + 1}), entries({T * K});
  qi.set(golden.values("q"));
  ki.set(golden.values("k"));
  std::vector<double> weights = golden.values("w");
  for (double& x : weights) x *= head_scale;
  w.set(weights);
  ids.set(golden.values("ids"));
  const std::vector<float> all_scores = golden.floats("scores"),
                           all_targets = golden.floats("target");
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t j = 0; j < K; ++j) {
      const int32_t id = ids.view()(t, j);
      if (id < 0) continue;  // scores and target stay NaN
      scores.view()(t, j) = all_scores[t * T + id];
      target.view()(t, j) = all_targets[t * T + id];
    }
  }
  indexer_kl<float>(launch(), scores.in(), target.in(), ids.in(), loss.view(),
                    dscore.view());
  double mean = 0;
  for (double x : loss.values()) mean += x / T;
  EXPECT_TRUE(Close(std::vector<float>{static_cast<float>(mean)},
                    golden.floats("kl"), {H * D}));
  invert_ids(launch(), ids.in(), offsets.view(), entries.view());
  Buffer<float> weight({1});
  weight.set({1.0f / T});
  indexer_loss_backward<float>(
      launch(), dscore.in(), View<const float>(weight.in().data, {T}, {0}),
      qi.in(), ki.in(), w.in(), 1 / std::sqrt(static_cast<double>(D)), ids.in(),
      offsets.in(), entries.in(), dqi.view(), dki.view(), dw.view(), nullptr);
  const int64_t terms = H * D + K + T;
  EXPECT_TRUE(Close(flat(dqi), golden.floats("dq"), {terms}));
  EXPECT_TRUE(Close(flat(dki), golden.floats("dk"), {terms}));
  std::vector<float> unscaled = flat(dw);
  for (float& x : unscaled) x *= static_cast<float>(head_scale);
  EXPECT_TRUE(Close(unscaled, golden.floats("dw"), {terms}));
}

// Losses of a whole model's indexers: `main` has the scores of layer i,
// `indexer_kl` the target and the loss of each row, over the selected keys and
// over all keys in range.
TEST(IndexerKl, EqualsGoldenRowsOfAModel) {
  const Fixture main = Fixture::open("tests/data/glm/fp32/main.safetensors");
  const Fixture kl =
      Fixture::open("tests/data/glm/fp32/indexer_kl.safetensors");
  int layers = 0;
  for (int i = 0; i < 6; ++i) {
    const std::string layer = "." + std::to_string(i);
    if (!kl.has("index_ids" + layer)) continue;
    ++layers;
    const std::vector<float> all = main.floats("index_scores" + layer);
    const int64_t T = main.shape("index_scores" + layer)[0];
    for (const std::string mode : {"dense", "sparse"}) {
      const int64_t K = mode == "dense" ? T : kl.shape("index_ids" + layer)[1];
      Buffer<float> scores({T, K}), target({T, K}), loss({T}), dscore({T, K});
      Buffer<int32_t> ids({T, K});
      const std::vector<float> p = kl.floats(mode + ".target" + layer);
      const std::vector<int32_t> chosen = kl.ints("index_ids" + layer);
      for (int64_t t = 0; t < T; ++t) {
        for (int64_t j = 0; j < K; ++j) {
          int32_t id = static_cast<int32_t>(j);
          if (mode == "sparse")
            id = chosen[t * K + j];
          else if (std::isinf(all[t * T + j]))
            id = -1;
          ids.view()(t, j) = id;
          if (id < 0) continue;
          scores.view()(t, j) = all[t * T + id];
          target.view()(t, j) = p[t * T + id];
        }
      }
      indexer_kl<float>(launch(), scores.in(), target.in(), ids.in(),
                        loss.view(), dscore.view());
      EXPECT_TRUE(
          Close(flat(loss), kl.floats(mode + ".kl_rows" + layer), {16 * T}))
          << mode << layer;
      double mean = 0;
      for (double x : loss.values()) mean += x / T;
      EXPECT_TRUE(Close(std::vector<float>{static_cast<float>(mean)},
                        kl.floats(mode + ".loss" + layer), {16 * T}))
          << mode << layer;
    }
  }
  EXPECT_EQ(layers, 4);
}

TEST(IndexerLossDeathTest, NamesTheShapesThatDisagree) {
  Problem<float> p(find("SmallOdd"));
  const Buffer<float> ki({7, 8});
  EXPECT_DEATH(
      indexer_loss_forward<float>(launch(), p.qi.in(), ki.in(), p.w.in(), 1.0,
                                  p.q.in(), p.kv.in(), p.lse.in(), 1.0,
                                  p.ids.in(), p.loss.view(), p.dscore.view()),
      "\\[indexer_loss\\] indexer: q is f32\\[7, 3, 7\\].*f32\\[7, 8\\]");
}

}  // namespace
}  // namespace tapeline
