#include <memory>

#include "tests/gradcheck/cases.h"

namespace tapeline {
namespace {

RopeConfig rope_config(bool interleaved, RopeConfig::Scaling scaling) {
  RopeConfig config;
  config.dim = 6;
  config.interleaved = interleaved;
  config.scaling = scaling;
  config.factor = 4;
  config.attention_factor = 1.1;
  config.original_max_position = 16;
  return config;
}

}  // namespace

OpCases attention_op_cases() {
  OpCases cases;
  const auto add_case = [&](const char* op, const char* what,
                            GradcheckCase check) {
    cases.push_back({op, what, std::move(check)});
  };
  using Scaling = RopeConfig::Scaling;
  const Sequence packed = Sequence::packed({0, 3, 4, 7});
  const auto rope_case = [&](const char* what, bool interleaved,
                             Scaling scaling, const Tensor& x) {
    const Tensor positions = packed.position_T.slice(0, 0, x.size(0));
    const RopeTable table =
        rope_table(rope_config(interleaved, scaling), positions);
    add_case("rope", what, {.inputs = {x}, .f = [table](const Tensors& in) {
                              return Tensors{rope(in[0], table)};
                            }});
  };
  rope_case("Interleaved", true, Scaling::kDefault, normal({7, 2, 6}, 1));
  rope_case("Halves", false, Scaling::kDefault, normal({7, 2, 6}, 2));
  rope_case("StridedYarn", true, Scaling::kYarn, strided({7, 3, 6}, 3));
  rope_case("StridedHalvesLlama3", false, Scaling::kLlama3,
            strided({7, 3, 6}, 4));
  rope_case("OneToken", true, Scaling::kDefault, normal({1, 2, 6}, 5));
  const RopeTable table =
      rope_table(rope_config(true, Scaling::kDefault), packed.position_T);
  add_case("rope", "OfExpandedHeads",
           {.inputs = {normal({7, 6}, 6)}, .f = [table](const Tensors& in) {
              return Tensors{rope(expand_heads(in[0], 2), table)};
            }});
  add_case("rope", "OfASplitPart",
           {.inputs = {normal({7, 2, 10}, 7)}, .f = [table](const Tensors& in) {
              return Tensors{rope(split(in[0], {4, 6})[1], table)};
            }});

  struct Sizes {
    const char* what;
    Sequence sequence;
    int64_t tokens, keys, heads, groups, qk_dim, v_dim;
    bool strided_rows;
  };
  for (const Sizes& s :
       {Sizes{"GroupedHeads", packed, 7, 7, 4, 2, 3, 5, false},
        Sizes{"GroupedHeadsStrided", packed, 7, 7, 4, 2, 3, 5, true},
        Sizes{"LatentHeads", packed, 7, 7, 3, 3, 7, 4, false},
        Sizes{"OneKeyHead", packed, 7, 7, 3, 1, 5, 2, true},
        Sizes{"OneToken", Sequence::packed({0, 1}), 1, 1, 2, 1, 3, 3, false},
        Sizes{"LengthsOfOne", Sequence::packed({0, 1, 2, 3}), 3, 3, 2, 2, 3, 3,
              false},
        Sizes{"AfterACache", Sequence::appended(4, 2), 2, 6, 2, 1, 3, 2,
              false}}) {
    const auto make = s.strided_rows ? strided : normal;
    add_case("attention", s.what,
             {.inputs = {make({s.tokens, s.heads, s.qk_dim}, 8, 1),
                         make({s.keys, s.groups, s.qk_dim}, 9, 1),
                         make({s.keys, s.groups, s.v_dim}, 10, 1)},
              .f = [sequence = s.sequence](const Tensors& in) {
                return Tensors{attention(in[0], in[1], in[2], sequence, 0.6)};
              }});
  }
  add_case("attention", "OneTensorAsKeyAndValue",
           {.inputs = {normal({7, 2, 4}, 11), normal({7, 4}, 12)},
            .f = [packed](const Tensors& in) {
              const Tensor kv = expand_heads(in[1], 2);
              return Tensors{attention(in[0], kv, kv, packed, 0.6)};
            }});
  return cases;
}

namespace {

DsaSelection selection(const std::vector<int32_t>& ids, const Shape& shape) {
  return {ints(ids, shape), std::make_shared<InvertedSelection>()};
}

// 5 tokens, 3 ids each; the fourth token sees nothing.
const std::vector<int32_t> kIds = {0, -1, -1, 0,  1,  -1, 1, 2,
                                   4, -1, -1, -1, -1, 0,  3};

}  // namespace

OpCases dsa_cases() {
  OpCases cases;
  const auto add_case = [&](const char* op, const char* what,
                            GradcheckCase check) {
    cases.push_back({op, what, std::move(check)});
  };
  const DsaSelection some = selection(kIds, {5, 3});
  for (const bool strided_rows : {false, true}) {
    const auto make = strided_rows ? strided : normal;
    add_case(
        "sparse_attention", strided_rows ? "Strided" : "PaddedIds",
        {.inputs = {make({5, 2, 7}, 1, 1), make({5, 7}, 2, 1)},
         .f = [some](const Tensors& in) {
           return Tensors{sparse_attention(in[0], in[1], some, 0.4, 5).o_THV};
         }});
  }
  add_case("sparse_attention", "OneTokenAllOfTheKey",
           {.inputs = {normal({1, 3, 4}, 3), normal({6, 4}, 4)},
            .f = [one = selection({1, 5}, {1, 2})](const Tensors& in) {
              return Tensors{sparse_attention(in[0], in[1], one, 0.4, 4).o_THV};
            }});
  add_case("sparse_attention", "TwoLayersShareASelection",
           {.inputs = {normal({5, 2, 4}, 5), normal({5, 4}, 6)},
            .f = [some](const Tensors& in) {
              const Tensor a =
                  sparse_attention(in[0], in[1], some, 0.4, 4).o_THV;
              return Tensors{sparse_attention(a, in[1], some, 0.4, 4).o_THV};
            }});
  const Sequence packed = Sequence::packed({0, 4, 5});
  const Tensor q_index = normal({5, 2, 3}, 7), k_index = normal({5, 3}, 8);
  const DsaSelection chosen =
      select_keys(q_index, k_index, normal({5, 2}, 9), packed, 0.5, 2);
  add_case(
      "sparse_attention", "KeysOfAnIndexer",
      {.inputs = {normal({5, 2, 4}, 10), normal({5, 4}, 11)},
       .f = [chosen](const Tensors& in) {
         return Tensors{sparse_attention(in[0], in[1], chosen, 0.4, 3).o_THV};
       }});

  AttentionTarget target{normal({5, 2, 4}, 12), normal({5, 4}, 13), {}, 0.4};
  target.lse_TH =
      sparse_attention(target.q_THD, target.kv_SD, some, 0.4, 4).lse_TH;
  // One row counts nothing.
  const Tensor row_weight =
      Tensor::from(std::vector<double>{0.5, 0.25, 2, 1, 0}, {5});
  for (const bool strided_rows : {false, true}) {
    const auto make = strided_rows ? strided : normal;
    add_case("indexer_loss", strided_rows ? "Strided" : "PaddedIds",
             {.inputs = {make({5, 2, 3}, 14, 1), make({5, 3}, 15, 1),
                         make({5, 2}, 16, 1)},
              .f = [=](const Tensors& in) {
                return Tensors{indexer_loss(in[0], in[1], in[2], 0.5, target,
                                            some, row_weight)};
              }});
  }
  add_case("indexer_loss", "WeightedByItsLoss",
           {.inputs = {normal({5, 2, 3}, 17), normal({5, 3}, 18),
                       normal({5, 2}, 19)},
            .f = [=](const Tensors& in) {
              const Tensor loss = indexer_loss(in[0], in[1], in[2], 0.5, target,
                                               some, row_weight);
              return Tensors{mul(loss, loss)};
            }});
  return cases;
}

}  // namespace tapeline
