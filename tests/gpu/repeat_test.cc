// Fifty times the same input beside a busy stream: the same bits. A race
// between blocks, or a sum whose order depends on who comes first, shows here
// and rarely elsewhere.
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/combine/combine.h"
#include "kernels/dispatch/dispatch.h"
#include "kernels/grouped_matmul/grouped_matmul.h"
#include "kernels/grouped_matmul/grouped_matmul_fast.h"
#include "kernels/route/route.h"
#include "kernels/router/router.h"
#include "kernels/sparse_attention/sparse_attention.h"
#include "kernels/sparse_attention/sparse_attention_fast.h"
#include "kernels/swiglu/swiglu.h"
#include "runtime/access.h"
#include "tests/gpu/busy.h"

namespace tapeline {
namespace {

constexpr int kRepeats = 50;

template <class T>
Tensor normal(const Shape& shape, uint32_t seed, float scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw(0, scale);
  std::vector<T> values(static_cast<size_t>(shape.elements()));
  for (T& x : values) x = T(draw(random));
  return Tensor::from(values, shape);
}

struct Named {
  std::string name;
  Tensor value;
};

// `run` overwrites the outputs, which are NaN, or 0 where it adds to them.
template <class Run>
void expect_same_bits(const std::vector<Named>& outputs,
                      const std::vector<Named>& sums, Run run) {
  std::vector<Named> all = outputs;
  all.insert(all.end(), sums.begin(), sums.end());
  std::vector<Tensor> first;
  const BusyGpu busy;
  for (int i = 0; i < kRepeats; ++i) {
    for (const Named& x : outputs) {
      if (x.value.dtype() == DType::kI32) {
        x.value.fill(-7);
      } else {
        x.value.fill(NAN);
      }
    }
    for (const Named& x : sums) x.value.set_zero();
    run();
    for (size_t k = 0; k < all.size(); ++k) {
      if (i == 0) {
        first.push_back(all[k].value.clone());
        continue;
      }
      ASSERT_EQ(differing_bytes(all[k].value, first[k]), 0)
          << all[k].name << " of run " << i;
    }
  }
  EXPECT_GE(busy.runs(), kRepeats) << "nothing ran beside";
}

// An ill-ordered comparison would pass everything.
TEST(Repeat, DifferencesAreCounted) {
  const Tensor a = Tensor::zeros({1 << 20}, DType::kF32), b = a.clone();
  EXPECT_EQ(differing_bytes(a, b), 0);
  b.slice(0, 999'999, 1'000'000).fill(1);  // 0x3f800000
  EXPECT_EQ(differing_bytes(a, b), 2);
}

TEST(Repeat, MoeLayerForwardAndBackward) {
  constexpr int64_t T = 4096, D = 1024, F = 384, E = 64, K = 8, R = T * K;
  RouterOptions rule;
  rule.top_k = K;
  rule.groups = 8;
  rule.top_groups = 4;
  rule.scale = 2.5;
  const Tensor logits = normal<float>({T, E}, 1), bias = normal<float>({E}, 2);
  const Tensor x = normal<bf16>({T, D}, 3), dy = normal<bf16>({T, D}, 4);
  const Tensor up = normal<bf16>({E, 2 * F, D}, 5, 0.03f);
  const Tensor down = normal<bf16>({E, D, F}, 6, 0.05f);
  const auto ints = [](const Shape& s) {
    return Tensor::empty(s, DType::kI32);
  };
  const auto bf16s = [](const Shape& s) {
    return Tensor::empty(s, DType::kBf16);
  };
  const auto floats = [](const Shape& s) {
    return Tensor::empty(s, DType::kF32);
  };
  const Tensor ids = ints({T, K}), offsets = ints({E + 1}), row = ints({T, K}),
               token = ints({R}), slot = ints({R});
  const Tensor weight = floats({T, K}), dweight = floats({T, K}),
               dlogits = floats({T, E});
  const Tensor x_R = bf16s({R, D}), h = bf16s({R, 2 * F}), a = bf16s({R, F}),
               z = bf16s({R, D}), y = bf16s({T, D});
  const Tensor dz = bf16s({R, D}), da = bf16s({R, F}), dh = bf16s({R, 2 * F}),
               dx_R = bf16s({R, D}), dx = bf16s({T, D});
  const Tensor dup = floats({E, 2 * F, D}), ddown = floats({E, D, F});
  const Tensor space = Tensor::empty(
      {static_cast<int64_t>(route_workspace_bytes(launch(), T, K, E))},
      DType::kU8);

  ASSERT_TRUE(grouped_matmul_forward_path(read<bf16>(x_R).view(),
                                          read<bf16>(up).view(),
                                          write<bf16>(h).view())
                  .wgmma);
  const Launch l = launch();
  expect_same_bits(
      {{"ids", ids},
       {"weight", weight},
       {"row", row},
       {"token", token},
       {"slot", slot},
       {"offsets", offsets},
       {"x_R", x_R},
       {"h", h},
       {"a", a},
       {"z", z},
       {"y", y},
       {"dz", dz},
       {"dweight", dweight},
       {"da", da},
       {"dh", dh},
       {"dx_R", dx_R},
       {"dx", dx},
       {"dlogits", dlogits}},
      {{"dup", dup}, {"ddown", ddown}}, [&] {
        const auto gate = [&](const auto& both) { return both.slice(1, 0, F); };
        const auto value = [&](const auto& both) {
          return both.slice(1, F, 2 * F);
        };
        router_choose<float>(l, read<float>(logits), read<float>(bias), rule,
                             write<int32_t>(ids));
        router_weights<float>(l, read<float>(logits), read<int32_t>(ids), rule,
                              write<float>(weight));
        route(l, read<int32_t>(ids), write<int32_t>(offsets),
              write<int32_t>(row), write<int32_t>(token), write<int32_t>(slot),
              reinterpret_cast<std::byte*>(write<uint8_t>(space).view().data));
        dispatch_forward<bf16>(l, read<bf16>(x), read<int32_t>(row),
                               write<bf16>(x_R));
        grouped_matmul_forward<bf16>(l, read<bf16>(x_R), read<bf16>(up),
                                     read<int32_t>(offsets), write<bf16>(h));
        swiglu_forward<bf16>(l, gate(read<bf16>(h).view()),
                             value(read<bf16>(h).view()), write<bf16>(a),
                             read<int32_t>(offsets));
        grouped_matmul_forward<bf16>(l, read<bf16>(a), read<bf16>(down),
                                     read<int32_t>(offsets), write<bf16>(z));
        combine_forward<bf16>(l, read<bf16>(z), read<float>(weight),
                              read<int32_t>(row), write<bf16>(y));

        combine_backward<bf16>(l, read<bf16>(dy), read<bf16>(z),
                               read<float>(weight), read<int32_t>(row),
                               write<bf16>(dz), write<float>(dweight));
        grouped_matmul_dgrad<bf16>(l, read<bf16>(dz), read<bf16>(down),
                                   read<int32_t>(offsets), write<bf16>(da));
        grouped_matmul_wgrad<bf16, float>(l, read<bf16>(dz), read<bf16>(a),
                                          read<int32_t>(offsets),
                                          write<float>(ddown));
        swiglu_backward<bf16>(
            l, read<bf16>(da), gate(read<bf16>(h).view()),
            value(read<bf16>(h).view()), gate(write<bf16>(dh).view()),
            value(write<bf16>(dh).view()), read<int32_t>(offsets));
        grouped_matmul_dgrad<bf16>(l, read<bf16>(dh), read<bf16>(up),
                                   read<int32_t>(offsets), write<bf16>(dx_R));
        grouped_matmul_wgrad<bf16, float>(l, read<bf16>(dh), read<bf16>(x_R),
                                          read<int32_t>(offsets),
                                          write<float>(dup));
        dispatch_backward<bf16>(l, read<bf16>(dx_R), read<int32_t>(row),
                                write<bf16>(dx));
        router_weights_backward<float>(l, read<float>(dweight),
                                       read<float>(logits), read<int32_t>(ids),
                                       rule, write<float>(dlogits));
      });
}

// More queries than the backward pass takes at a time, some ids of -1.
TEST(Repeat, SparseAttentionForwardAndBackward) {
  constexpr int64_t T = 600, S = 4096, H = 64, D = 576, V = 512, K = 2048;
  constexpr double kScale = 0.0625;
  std::vector<int32_t> chosen(T * K);
  std::mt19937 random(1);
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t j = 0; j < K; ++j) {
      const bool none = t % 3 == 0 && j > 100 + t;
      chosen[t * K + j] =
          none ? -1 : static_cast<int32_t>(2 * j + random() % 2);
    }
  }
  const Tensor ids = Tensor::from(chosen, {T, K});
  const Tensor q = normal<bf16>({T, H, D}, 2), kv = normal<bf16>({S, D}, 3);
  const Tensor dout = normal<bf16>({T, H, V}, 4);
  const Tensor o = Tensor::empty({T, H, V}, DType::kBf16);
  const Tensor lse = Tensor::empty({T, H}, DType::kF32);
  const Tensor dq = Tensor::empty({T, H, D}, DType::kBf16);
  const Tensor dkv = Tensor::empty({S, D}, DType::kBf16);
  const Tensor offsets = Tensor::empty({S + 1}, DType::kI32);
  const Tensor entries = Tensor::empty({T * K}, DType::kI32);
  const Launch l = launch();
  ASSERT_EQ(cuda::sparse_attention_path({true, D, V, K, kScale, true}),
            cuda::SparseAttentionPath::kWgmma);
  const auto bytes = [](size_t n) {
    return Tensor::empty({static_cast<int64_t>(n)}, DType::kU8);
  };
  const Tensor invert_space =
      bytes(invert_ids_workspace_bytes(l, read<int32_t>(ids).view(), S));
  const Tensor space = bytes(sparse_attention_backward_workspace_bytes<bf16>(
      l, read<bf16>(q).view(), read<bf16>(kv).view(), read<int32_t>(ids).view(),
      read<bf16>(o).view(), kScale));
  expect_same_bits(
      {{"o", o},
       {"lse", lse},
       {"dq", dq},
       {"dkv", dkv},
       {"offsets", offsets},
       {"entries", entries}},
      {}, [&] {
        sparse_attention_forward<bf16>(l, read<bf16>(q), read<bf16>(kv),
                                       read<int32_t>(ids), kScale,
                                       write<bf16>(o), write<float>(lse));
        invert_ids(l, read<int32_t>(ids), write<int32_t>(offsets),
                   write<int32_t>(entries),
                   reinterpret_cast<std::byte*>(
                       write<uint8_t>(invert_space).view().data));
        sparse_attention_backward<bf16>(
            l, read<bf16>(dout), read<bf16>(q), read<bf16>(kv),
            read<int32_t>(ids), read<bf16>(o), read<float>(lse),
            read<int32_t>(offsets), read<int32_t>(entries), kScale,
            write<bf16>(dq), write<bf16>(dkv),
            reinterpret_cast<std::byte*>(write<uint8_t>(space).view().data));
      });
}

}  // namespace
}  // namespace tapeline
