// At the sizes of real models, in the GPU's own memory: whole numbers equal the
// CPU's, sums of floats those of the same order.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/embedding/embedding.h"
#include "kernels/indexer/indexer.h"
#include "kernels/indexer_loss/indexer_loss.h"
#include "kernels/route/route.h"
#include "kernels/router/router.h"
#include "kernels/sparse_attention/sparse_attention.h"
#include "kernels/top_k/top_k.h"
#include "runtime/access.h"
#include "tests/gpu/busy.h"
#include "tests/support/close.h"
#include "tests/support/threads.h"

namespace tapeline {
namespace {

template <class T>
std::vector<T> normal(int64_t n, uint32_t seed, float scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw(0, scale);
  std::vector<T> values(static_cast<size_t>(n));
  for (T& x : values) x = T(draw(random));
  return values;
}

Tensor ints(const Shape& shape) { return Tensor::empty(shape, DType::kI32); }
Tensor bytes(size_t n) {
  return Tensor::empty({static_cast<int64_t>(n)}, DType::kU8);
}
std::byte* data_of(const Tensor& space) {
  return reinterpret_cast<std::byte*>(write<uint8_t>(space).view().data);
}

// --- invert_ids --------------------------------------------------------------

struct Selection {
  const char* name;
  int64_t tokens, slots, keys;
  // The id of (token, slot), or -1.
  int32_t (*id)(int64_t t, int64_t j, uint32_t random);
};

void expect_inverse_of_the_cpu(const Selection& s, bool with_workspace) {
  SCOPED_TRACE(testing::Message()
               << s.name << (with_workspace ? ", workspace" : ""));
  std::mt19937 random(5);
  std::vector<int32_t> chosen(s.tokens * s.slots);
  for (int64_t t = 0; t < s.tokens; ++t) {
    for (int64_t j = 0; j < s.slots; ++j) {
      chosen[t * s.slots + j] = s.id(t, j, random());
    }
  }
  const int64_t pairs = s.tokens * s.slots;
  Threads cpu(1);
  std::vector<int32_t> expected_offsets(s.keys + 1);
  std::vector<int32_t> expected(pairs + 3, -9);
  invert_ids(cpu, view_of(chosen, {s.tokens, s.slots}),
             view_of(expected_offsets, {s.keys + 1}),
             view_of(expected, {pairs + 3}));
  const Tensor ids = Tensor::from(chosen, {s.tokens, s.slots});
  const Tensor offsets = ints({s.keys + 1}), entries = ints({pairs + 3});
  offsets.fill(-9);
  entries.fill(-9);
  const Tensor space = bytes(
      invert_ids_workspace_bytes(launch(), read<int32_t>(ids).view(), s.keys));
  space.fill(0x7f);
  invert_ids(launch(), read<int32_t>(ids), write<int32_t>(offsets),
             write<int32_t>(entries),
             with_workspace ? data_of(space) : nullptr);
  EXPECT_EQ(offsets.to_vector<int32_t>(), expected_offsets);
  // No EXPECT_EQ: millions of numbers would be printed.
  EXPECT_TRUE(entries.to_vector<int32_t>() == expected);
}

TEST(RealSizes, InvertIds) {
  const Selection selections[] = {
      // Ascending and distinct, as top_k gives them.
      {"2048 of 8192", 2048, 2048, 8192,
       [](int64_t, int64_t j, uint32_t r) {
         return static_cast<int32_t>(4 * j + r % 4);
       }},
      {"2048 of 100000, some -1", 300, 2048, 100000,
       [](int64_t t, int64_t j, uint32_t r) {
         return t % 5 == 0 && j > 700 ? -1
                                      : static_cast<int32_t>(48 * j + r % 48);
       }},
      {"any order, repeated", 777, 301, 1000,
       [](int64_t, int64_t, uint32_t r) {
         return static_cast<int32_t>(r % 1001) - 1;
       }},
      {"one key for all", 500, 256, 20000,
       [](int64_t, int64_t, uint32_t) { return int32_t{8191}; }},
      {"alternating keys of two pieces", 300, 128, 8200,
       [](int64_t, int64_t j, uint32_t) {
         return static_cast<int32_t>(8190 + j % 4);
       }},
      {"causal", 4096, 512, 4096,
       [](int64_t t, int64_t j, uint32_t) {
         return j <= t ? static_cast<int32_t>(t < 512 ? j : t - j) : -1;
       }},
      {"nothing", 100, 64, 50,
       [](int64_t, int64_t, uint32_t) { return int32_t{-1}; }},
  };
  for (const Selection& s : selections) {
    expect_inverse_of_the_cpu(s, true);
    expect_inverse_of_the_cpu(s, false);
  }
}

// --- indexer_loss ------------------------------------------------------------

// So many queries that their rows of keys take two chunks of workspace. Small
// numbers, whose sums are exact in any order: the CPU's bits.
TEST(RealSizes, IndexerLossBackwardInChunks) {
  constexpr int64_t kTokens = 2100, kKeys = 2048, kHeads = 2, kDim = 64;
  std::mt19937 random(11);
  const auto draw = [&]<class T>(std::vector<T>& values,
                                 std::vector<float> among) {
    for (T& x : values) x = T(among[random() % among.size()]);
  };
  std::vector<bf16> q(kTokens * kHeads * kDim), k(kKeys * kDim);
  std::vector<float> w(kTokens * kHeads), dscore(kTokens * kKeys);
  draw(q, {-2, -1, 0, 1, 2});
  draw(k, {-2, -1, 0, 1, 2});
  draw(w, {-1, 1, 2});
  draw(dscore, {-1, 0, 1});
  std::vector<int32_t> ids(kTokens * kKeys);
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t j = 0; j < kKeys; ++j) {
      ids[t * kKeys + j] = static_cast<int32_t>((5 * j + t) % kKeys);
    }
  }
  const double scale = 0.5;
  std::vector<int32_t> offsets(kKeys + 1), entries(ids.size());
  std::vector<float> dloss(kTokens, 1), dw(w.size());
  std::vector<bf16> dq(q.size()), dk(k.size());
  const Shape q_shape{kTokens, kHeads, kDim}, k_shape{kKeys, kDim};
  const Shape w_shape{kTokens, kHeads}, pairs{kTokens, kKeys};
  const Shape all{kTokens * kKeys};
  Threads cpu(1);
  invert_ids(cpu, view_of(ids, pairs), view_of(offsets, {kKeys + 1}),
             view_of(entries, all));
  indexer_loss_backward<bf16>(
      cpu, view_of(dscore, pairs), view_of(dloss, {kTokens}),
      view_of(q, q_shape), view_of(k, k_shape), view_of(w, w_shape), scale,
      view_of(ids, pairs), view_of(offsets, {kKeys + 1}), view_of(entries, all),
      view_of(dq, q_shape), view_of(dk, k_shape), view_of(dw, w_shape),
      nullptr);

  const Tensor q_THD = Tensor::from(q, q_shape),
               k_SD = Tensor::from(k, k_shape);
  const Tensor ids_TK = Tensor::from(ids, pairs);
  const Tensor dq_THD = Tensor::empty(q_shape, DType::kBf16);
  const Tensor dk_SD = Tensor::empty(k_shape, DType::kBf16);
  const Tensor dw_TH = Tensor::empty(w_shape, DType::kF32);
  const size_t workspace = indexer_loss_backward_workspace_bytes<bf16>(
      launch(), read<bf16>(q_THD), read<bf16>(k_SD), read<int32_t>(ids_TK),
      scale);
  // Less than all rows: there are two chunks.
  ASSERT_GT(workspace, 0u);
  ASSERT_LT(workspace, ids.size() * kDim * sizeof(float));
  const Tensor space = bytes(workspace);
  space.fill(0x7f);
  indexer_loss_backward<bf16>(
      launch(), read<float>(Tensor::from(dscore, pairs)),
      read<float>(Tensor::from(dloss, {kTokens})), read<bf16>(q_THD),
      read<bf16>(k_SD), read<float>(Tensor::from(w, w_shape)), scale,
      read<int32_t>(ids_TK), read<int32_t>(Tensor::from(offsets, {kKeys + 1})),
      read<int32_t>(Tensor::from(entries, all)), write<bf16>(dq_THD),
      write<bf16>(dk_SD), write<float>(dw_TH), data_of(space));
  EXPECT_TRUE(Bitwise(dq_THD.to_vector<bf16>(), dq));
  EXPECT_TRUE(Bitwise(dk_SD.to_vector<bf16>(), dk));
  EXPECT_TRUE(Bitwise(dw_TH.to_vector<float>(), dw));
}

// --- embedding ---------------------------------------------------------------

// Sums are in the order of tokens on both sides: the same bits.
void expect_rows_of_the_cpu(int64_t tokens, int64_t vocabulary, int64_t width,
                            bool words) {
  SCOPED_TRACE(testing::Message() << tokens << " tokens of " << vocabulary
                                  << (words ? " words" : ""));
  constexpr int32_t kPadding = 3;
  std::mt19937 random(9);
  std::uniform_real_distribution<double> draw(0, 1);
  std::vector<int32_t> chosen(tokens);
  for (int32_t& id : chosen) {
    // The n-th frequent word is about n times as rare as the first.
    const double u = draw(random);
    id = static_cast<int32_t>(words ? std::exp(u * std::log(vocabulary)) - 1
                                    : u * static_cast<double>(vocabulary));
  }
  const std::vector<bf16> dy = normal<bf16>(tokens * width, 1);
  const std::vector<float> before = normal<float>(vocabulary * width, 2);
  std::vector<float> sums = before;
  Threads cpu(1);
  embedding_backward<bf16>(cpu, view_of(chosen, {tokens}),
                           view_of(dy, {tokens, width}),
                           view_of(sums, {vocabulary, width}), kPadding);
  const size_t needed =
      embedding_backward_workspace_bytes(launch(), tokens, vocabulary);
  ASSERT_GT(needed, 0u);
  const Tensor workspace = bytes(needed);
  workspace.fill(0x7f);
  for (std::byte* given :
       {static_cast<std::byte*>(nullptr), data_of(workspace)}) {
    const Tensor dtable = Tensor::from(before, {vocabulary, width});
    embedding_backward<bf16>(launch(),
                             read<int32_t>(Tensor::from(chosen, {tokens})),
                             read<bf16>(Tensor::from(dy, {tokens, width})),
                             write<float>(dtable), kPadding, given);
    EXPECT_TRUE(Bitwise(dtable.to_vector<float>(), sums))
        << (given == nullptr ? "without" : "with") << " a workspace";
  }
}

TEST(RealSizes, EmbeddingBackward) {
  expect_rows_of_the_cpu(70000, 154880, 64, /*words=*/false);
  expect_rows_of_the_cpu(70000, 154880, 64, /*words=*/true);
  expect_rows_of_the_cpu(8192, 151936, 128, /*words=*/true);
  expect_rows_of_the_cpu(140000, 300, 40, /*words=*/true);
  expect_rows_of_the_cpu(5000, 1, 24, /*words=*/false);
  expect_rows_of_the_cpu(4096, 1'000'000, 16, /*words=*/true);
  expect_rows_of_the_cpu(9000, 700, 2048, /*words=*/true);
  expect_rows_of_the_cpu(3000, 60, 7168, /*words=*/true);
}

// --- router and route --------------------------------------------------------

void expect_choice_of_the_cpu(int64_t experts, RouterOptions rule, bool biased,
                              int levels) {
  SCOPED_TRACE(testing::Message()
               << experts << " experts, " << rule.top_groups << " of "
               << rule.groups << " groups, " << levels << " levels");
  constexpr int64_t kTokens = 16384;
  const int64_t k = rule.top_k;
  std::vector<float> logits = normal<float>(kTokens * experts, 1);
  if (levels > 0) {  // ties
    for (float& x : logits) x = std::round(x * levels) / levels;
  }
  const std::vector<float> bias = normal<float>(biased ? experts : 0, 2, 0.1f);
  Threads cpu(1);
  std::vector<int32_t> expected(kTokens * k);
  router_choose<float>(cpu, view_of(logits, {kTokens, experts}),
                       biased ? view_of(bias, {experts}) : View<const float>(),
                       rule, view_of(expected, {kTokens, k}));
  const Tensor x = Tensor::from(logits, {kTokens, experts});
  const Tensor b = Tensor::from(bias, {biased ? experts : 0});
  const Tensor ids = ints({kTokens, k});
  router_choose<float>(launch(), read<float>(x),
                       biased ? read<float>(b).view() : View<const float>(),
                       rule, write<int32_t>(ids));
  const std::vector<int32_t> got = ids.to_vector<int32_t>();
  // exp differs in the last place: scores that near each other may change
  // places. With ties of logits, equal scores must not.
  int64_t other = 0;
  for (size_t i = 0; i < got.size(); ++i) other += got[i] != expected[i];
  EXPECT_LE(other, levels > 0 && !biased ? 0 : kTokens * k / 2000);

  // Weights of the same choice, and where rows go.
  std::vector<float> weights(kTokens * k);
  router_weights<float>(cpu, view_of(logits, {kTokens, experts}),
                        view_of(got, {kTokens, k}), rule,
                        view_of(weights, {kTokens, k}));
  const Tensor w = Tensor::empty({kTokens, k}, DType::kF32);
  router_weights<float>(launch(), read<float>(x), read<int32_t>(ids), rule,
                        write<float>(w));
  EXPECT_TRUE(Close(w.to_vector<float>(), weights, {.sum_length = experts}));

  const int64_t rows = kTokens * k, capacity = rows + 1000;
  std::vector<int32_t> some = got;  // the last two ranks pass tokens on
  for (size_t i = 0; i < some.size(); i += 3) some[i] = -1;
  for (const std::vector<int32_t>& choice : {got, some}) {
    std::vector<int32_t> e_offsets(experts + 1), e_row(rows), e_token(capacity),
        e_slot(capacity);
    route(cpu, view_of(choice, {kTokens, k}), view_of(e_offsets, {experts + 1}),
          view_of(e_row, {kTokens, k}), view_of(e_token, {capacity}),
          view_of(e_slot, {capacity}));
    const Tensor space =
        bytes(route_workspace_bytes(launch(), kTokens, k, experts));
    const auto in_space = write<uint8_t>(space);
    EXPECT_EQ(space.bytes() > 0, experts <= 512);
    for (std::byte* workspace :
         {static_cast<std::byte*>(nullptr),
          reinterpret_cast<std::byte*>(in_space.view().data)}) {
      const Tensor offsets = ints({experts + 1}), row = ints({kTokens, k}),
                   token = ints({capacity}), slot = ints({capacity});
      route(launch(), read<int32_t>(Tensor::from(choice, {kTokens, k})),
            write<int32_t>(offsets), write<int32_t>(row), write<int32_t>(token),
            write<int32_t>(slot), workspace);
      EXPECT_EQ(offsets.to_vector<int32_t>(), e_offsets);
      EXPECT_TRUE(row.to_vector<int32_t>() == e_row);
      EXPECT_TRUE(token.to_vector<int32_t>() == e_token);
      EXPECT_TRUE(slot.to_vector<int32_t>() == e_slot);
    }
  }
}

TEST(RealSizes, RouterAndRoute) {
  RouterOptions grouped;
  grouped.top_k = 8;
  grouped.groups = 8;
  grouped.top_groups = 4;
  grouped.scale = 2.5;
  RouterOptions all = grouped;
  all.groups = all.top_groups = 1;
  RouterOptions softmax = all;
  softmax.score = RouterOptions::kSoftmax;
  for (int levels : {0, 2}) {
    expect_choice_of_the_cpu(256, grouped, true, levels);
    expect_choice_of_the_cpu(256, all, false, levels);
    expect_choice_of_the_cpu(128, softmax, false, levels);
    expect_choice_of_the_cpu(384, all, true, levels);
    expect_choice_of_the_cpu(72, grouped, false, levels);
    expect_choice_of_the_cpu(1000, all, false, levels);
  }
}

// --- indexer -----------------------------------------------------------------

// In tiles of rows, the last one shorter: what top_k takes from all scores.
TEST(RealSizes, IndexerSelectsInTiles) {
  constexpr int64_t kHeads = 32, kDim = 128, kKeys = 5000;
  constexpr int kSelected = 2048;
  for (int64_t tokens : {1, 511, 512, 513, 1300}) {
    SCOPED_TRACE(tokens);
    const Tensor q = Tensor::from(normal<bf16>(tokens * kHeads * kDim, 1),
                                  {tokens, kHeads, kDim});
    const Tensor k = Tensor::from(normal<bf16>(kKeys * kDim, 2), {kKeys, kDim});
    const Tensor w =
        Tensor::from(normal<float>(tokens * kHeads, 3), {tokens, kHeads});
    std::vector<int32_t> first(tokens), last(tokens);
    for (int64_t t = 0; t < tokens; ++t) {
      first[t] = static_cast<int32_t>(t % 7);
      last[t] = static_cast<int32_t>(kKeys - tokens + t);
    }
    const Tensor begin = Tensor::from(first, {tokens});
    const Tensor end = Tensor::from(last, {tokens});
    const KeyRange range = {read<int32_t>(begin), read<int32_t>(end)};
    const Tensor scores = Tensor::empty({tokens, kKeys}, DType::kF32);
    const Tensor expected = ints({tokens, kSelected});
    indexer_scores<bf16>(launch(), read<bf16>(q), read<bf16>(k), read<float>(w),
                         range, 0.1, write<float>(scores));
    top_k<float>(launch(), read<float>(scores), range, kSelected,
                 write<int32_t>(expected));
    const size_t size =
        indexer_select_workspace_bytes<bf16>(launch(), tokens, kKeys);
    // What lies behind it stays as it is.
    constexpr int64_t kGuard = 4096;
    const Tensor space = bytes(size + kGuard);
    space.fill(0x7f);
    const Tensor ids = ints({tokens, kSelected});
    indexer_select<bf16>(launch(), read<bf16>(q), read<bf16>(k), read<float>(w),
                         range, 0.1, kSelected, write<int32_t>(ids),
                         data_of(space));
    EXPECT_EQ(differing_bytes(ids, expected), 0);
    const auto guard = space.slice(0, space.size(0) - kGuard, space.size(0))
                           .to_vector<uint8_t>();
    EXPECT_EQ(std::count(guard.begin(), guard.end(), 0x7f), kGuard);
  }
}

}  // namespace
}  // namespace tapeline
