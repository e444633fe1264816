#include "tests/gradcheck/cases.h"

namespace tapeline {
namespace {

Tensor bytes(const std::vector<uint8_t>& values) {
  return Tensor::from(values, {static_cast<int64_t>(values.size())});
}
Tensor doubles(const std::vector<double>& values) {
  return Tensor::from(values, {static_cast<int64_t>(values.size())});
}

}  // namespace

OpCases loss_cases() {
  OpCases cases;
  const auto add_case = [&](const char* op, const char* what,
                            GradcheckCase check, bool has_gradient = true) {
    cases.push_back({op, what, std::move(check), has_gradient});
  };
  const Parameter w = weight({11, 3}, 1);
  struct Labels {
    const char* what;
    Tensor x, label, weight;
    bool any;
  };
  const Tensor denominators = doubles({0.5, 0.25, 1, 0, 2});
  for (const Labels& l :
       {Labels{"SomeIgnored", normal({5, 3}, 2),
               ints({10, -100, 0, 4, -100}, {5}), denominators, true},
        Labels{"Strided", strided({5, 3}, 3), ints({1, 2, 3, 4, 0}, {5}),
               denominators, true},
        Labels{"OneToken", normal({1, 3}, 4), ints({7}, {1}), doubles({3}),
               true},
        Labels{"NoLabel", normal({2, 3}, 5), ints({-100, -100}, {2}),
               doubles({1, 1}), false}}) {
    add_case("linear_cross_entropy", l.what,
             {.inputs = {l.x},
              .parameters = {w},
              .f =
                  [w, l](const Tensors& in) {
                    return Tensors{
                        linear_cross_entropy(in[0], w, l.label, l.weight).loss};
                  }},
             l.any);
  }
  add_case("linear_cross_entropy", "OfAConstant",
           {.parameters = {w}, .f = [w, x = normal({2, 3}, 6)](const Tensors&) {
              return Tensors{linear_cross_entropy(x, w, ints({1, 9}, {2}),
                                                  doubles({1, 0.5}))
                                 .loss};
            }});
  add_case("linear_cross_entropy", "WeightedByItsLoss",
           {.inputs = {normal({3, 3}, 9)},
            .parameters = {w},
            .f = [w](const Tensors& in) {
              const Tensor loss =
                  linear_cross_entropy(in[0], w, ints({1, -100, 9}, {3}),
                                       doubles({1, 1, 0.5}))
                      .loss;
              return Tensors{mul(loss, loss)};
            }});
  Parameter frozen = weight({11, 3}, 7);
  frozen.set_trainable(false);
  add_case("linear_cross_entropy", "FrozenHeadWeightedByItsLoss",
           {.inputs = {normal({2, 3}, 8)}, .f = [frozen](const Tensors& in) {
              const Tensor loss =
                  linear_cross_entropy(in[0], frozen, ints({1, 9}, {2}),
                                       doubles({1, 0.5}))
                      .loss;
              return Tensors{mul(loss, loss)};
            }});

  const Tensor experts = ints({0, 1, 1, 3, 0, 1, 3, 0, 1, 0}, {5, 2});
  const Tensor some_valid = bytes({1, 0, 1, 1, 0}),
               none_valid = bytes({0, 0, 0, 0, 0});
  using Kind = BalanceRule::Kind;
  struct Balance {
    const char* what;
    Kind kind;
    Tensor logits, valid;
    bool any;
  };
  // Biases as they are in training, small beside the scores: s + b is positive.
  const Tensor bias = normal({4}, 9, 0.05);
  for (const Balance& c :
       {Balance{"Sigmoid", Kind::kSigmoid, normal({5, 4}, 10), {}, true},
        Balance{"SigmoidSomeValid", Kind::kSigmoid, strided({5, 4}, 11),
                some_valid, true},
        Balance{
            "Biased", Kind::kSigmoidBiased, transposed({5, 4}, 12), {}, true},
        Balance{"BiasedSomeValid", Kind::kSigmoidBiased, normal({5, 4}, 13),
                some_valid, true},
        Balance{"Softmax", Kind::kSoftmax, strided({5, 4}, 14), {}, true},
        Balance{"SoftmaxSomeValid", Kind::kSoftmax, normal({5, 4}, 15),
                some_valid, true},
        Balance{"NoneValid", Kind::kSoftmax, normal({5, 4}, 16), none_valid,
                false}}) {
    add_case("balance_loss", c.what,
             {.inputs = {c.logits},
              .f =
                  [=](const Tensors& in) {
                    const Tensor loss =
                        balance_loss(in[0], bias, experts, c.valid, {c.kind});
                    return Tensors{mul(loss, loss)};
                  }},
             c.any);
  }
  add_case("balance_loss", "OneToken",
           {.inputs = {normal({1, 4}, 17)}, .f = [](const Tensors& in) {
              return Tensors{balance_loss(in[0], {}, ints({2}, {1, 1}), {},
                                          {Kind::kSoftmax})};
            }});
  struct Z {
    const char* what;
    Tensor logits, valid;
    bool any;
  };
  for (const Z& c : {Z{"AllValid", strided({5, 4}, 18), {}, true},
                     Z{"SomeValid", transposed({5, 4}, 19), some_valid, true},
                     Z{"OneToken", normal({1, 3}, 20), {}, true},
                     Z{"NoneValid", normal({5, 4}, 21), none_valid, false}}) {
    add_case("z_loss", c.what,
             {.inputs = {c.logits},
              .f =
                  [=](const Tensors& in) {
                    const Tensor loss = z_loss(in[0], c.valid);
                    return Tensors{mul(loss, loss)};
                  }},
             c.any);
  }
  return cases;
}

OpCases model_cases() {
  // A block of everything: latent attention over packed sequences, experts with
  // an auxiliary loss, a tied head. 6 tokens of 4.
  const Parameter table = weight({7, 4}, 31), norm = weight({4}, 32),
                  q_proj = weight({6, 4}, 33), kv_proj = weight({5, 4}, 34),
                  out_proj = weight({4, 6}, 35), router = weight({3, 4}, 36),
                  gate_up = weight({3, 4, 4}, 37), down = weight({3, 4, 2}, 38);
  const Sequence sequence = Sequence::packed({0, 4, 5, 6});
  RopeConfig config;
  config.dim = 2;
  const RopeTable rotary = rope_table(config, sequence.position_T);
  const Tensor ids = ints({1, 6, 0, 1, 3, 6}, {6});
  const Tensor labels = ints({6, 0, 1, -100, 6, -100}, {6});
  const Tensor weights = doubles({1, 1, 1, 1, 1, 1});
  const Tensor experts = ints({0, 1, 1, 2, 0, 2, 1, 0, 2, 1, 0, 1}, {6, 2});
  RouterRule rule;
  rule.top_k = 2;
  const auto model = [=](const Tensor& noise) {
    const Tensor x = embedding(ids, table) + noise;
    const Tensor h = rms_norm(x, norm, 1e-3);
    // Two heads of 1 + 2 query elements, one key head, values of 3.
    const Tensors q = split(reshape(linear(h, q_proj), {6, 2, 3}), {1, 2});
    const Tensors kv = split(linear(h, kv_proj), {3, 2});
    const Tensor k = concat({reshape(split(kv[0], {1, 2})[0], {6, 1, 1}),
                             rope(reshape(kv[1], {6, 1, 2}), rotary)});
    const Tensor o = attention(concat({q[0], rope(q[1], rotary)}), k,
                               reshape(kv[0], {6, 1, 3}), sequence, 0.7);
    const Tensor y = x + linear(reshape(o, {6, 6}), out_proj);
    const Tensor logits = linear(rms_norm(y, norm, 1e-3), router);
    const Routed rows = dispatch(y, experts, 3);
    const Routed hidden = routed_swiglu(grouped_linear(rows, gate_up));
    const Tensor moe = combine(grouped_linear(hidden, down),
                               router_weights(logits, experts, rule));
    return linear_cross_entropy(y + moe, table, labels, weights).loss +
           scale(z_loss(logits, {}), 0.3);
  };
  OpCases cases;
  cases.push_back(
      {"linear_cross_entropy",
       "WholeModel",
       {.inputs = {normal({6, 4}, 39, 0.1)},
        .parameters = {table, norm, q_proj, kv_proj, out_proj, router, gate_up,
                       down},
        .f = [model](const Tensors& in) { return Tensors{model(in[0])}; }}});
  return cases;
}

}  // namespace tapeline
