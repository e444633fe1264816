#include "tests/gradcheck/cases.h"

namespace tapeline {
namespace {

RouterRule rule(bool sigmoid, int top_k, int groups, int top_groups,
                bool normalize) {
  RouterRule out;
  out.sigmoid = sigmoid;
  out.top_k = top_k;
  out.groups = groups;
  out.top_groups = top_groups;
  out.normalize = normalize;
  out.scale = 2.5;
  return out;
}

// 5 tokens, 2 of 4 experts each: expert 2 has no token, expert 3 has one.
Tensor unbalanced() { return ints({0, 1, 1, 0, 0, 1, 3, 0, 1, 0}, {5, 2}); }
// The same with choices that go nowhere, one token without any.
Tensor dropping() { return ints({0, -1, 1, 0, -1, -1, 3, 0, 1, -1}, {5, 2}); }

}  // namespace

OpCases moe_cases() {
  OpCases cases;
  const auto add_case = [&](const char* op, const char* what,
                            GradcheckCase check) {
    cases.push_back({op, what, std::move(check)});
  };
  struct Router {
    const char* what;
    RouterRule rule;
    Tensor logits;
  };
  for (const Router& r :
       {Router{"Sigmoid", rule(true, 2, 1, 1, false), normal({5, 6}, 1)},
        Router{"SigmoidNormalized", rule(true, 3, 1, 1, true),
               strided({5, 6}, 2)},
        Router{"SigmoidGroups", rule(true, 2, 3, 2, true),
               transposed({5, 6}, 3)},
        Router{"Softmax", rule(false, 2, 1, 1, false), strided({5, 6}, 4)},
        Router{"SoftmaxNormalized", rule(false, 3, 1, 1, true),
               normal({5, 6}, 5)},
        Router{"OneToken", rule(false, 2, 1, 1, true), normal({1, 7}, 6)},
        Router{"AllExperts", rule(true, 3, 1, 1, true), normal({2, 3}, 7)}}) {
    // The bias moves choices, not weights, and has no gradient.
    const Tensor bias = normal({r.logits.size(1)}, 8);
    const Tensor experts = choose_experts(r.logits, bias, r.rule);
    add_case("router_weights", r.what,
             {.inputs = {r.logits},
              .f = [rule = r.rule, experts](const Tensors& in) {
                return Tensors{router_weights(in[0], experts, rule)};
              }});
  }
  add_case("router_weights", "ChoicesThatGoNowhere",
           {.inputs = {normal({5, 4}, 9)}, .f = [](const Tensors& in) {
              return Tensors{
                  router_weights(in[0], dropping(), rule(true, 2, 1, 1, true))};
            }});

  add_case("dispatch", "Unbalanced",
           {.inputs = {normal({5, 3}, 10)}, .f = [](const Tensors& in) {
              return Tensors{dispatch(in[0], unbalanced(), 4).data};
            }});
  add_case("dispatch", "OneToken",
           {.inputs = {strided({1, 3}, 11)}, .f = [](const Tensors& in) {
              return Tensors{dispatch(in[0], ints({2}, {1, 1}), 4).data};
            }});
  const Parameter w = weight({4, 2, 3}, 12);
  add_case("grouped_linear", "ExpertsWithoutTokens",
           {.inputs = {strided({5, 3}, 13)},
            .parameters = {w},
            .f = [w](const Tensors& in) {
              const Routed x = dispatch(in[0], unbalanced(), 4);
              return Tensors{grouped_linear(x, w).data};
            }});
  add_case("grouped_linear", "OneTokenOneExpert",
           {.inputs = {normal({1, 3}, 14)},
            .parameters = {w},
            .f = [w](const Tensors& in) {
              const Routed x = dispatch(in[0], ints({3}, {1, 1}), 4);
              return Tensors{grouped_linear(x, w).data};
            }});
  add_case("routed_swiglu", "Unbalanced",
           {.inputs = {strided({5, 6}, 15)}, .f = [](const Tensors& in) {
              const Routed x = dispatch(in[0], unbalanced(), 4);
              return Tensors{routed_swiglu(x).data};
            }});
  const Tensor weights = strided({5, 2}, 16);
  for (const bool drops : {false, true}) {
    const Tensor experts = drops ? dropping() : unbalanced();
    add_case("combine", drops ? "ChoicesThatGoNowhere" : "Unbalanced",
             {.inputs = {strided({5, 3}, 17), weights},
              .f = [experts](const Tensors& in) {
                return Tensors{combine(dispatch(in[0], experts, 4), in[1])};
              }});
    // Gate and up projections read the same rows: their gradients add.
    const Parameter gate = weight({4, 4, 3}, 18), up = weight({4, 4, 3}, 19),
                    down = weight({4, 3, 2}, 20);
    add_case("grouped_linear", drops ? "ExpertsThatDrop" : "Experts",
             {.inputs = {normal({5, 3}, 21), weights},
              .parameters = {gate, up, down},
              .f = [=](const Tensors& in) {
                const Routed x = dispatch(in[0], experts, 4);
                const Routed a = routed_swiglu(grouped_linear(x, gate));
                const Routed b = routed_swiglu(grouped_linear(x, up));
                return Tensors{combine(grouped_linear(a, down), in[1]),
                               combine(grouped_linear(b, down), in[1])};
              }});
  }
  add_case("combine", "OneToken",
           {.inputs = {normal({1, 3}, 22), normal({1, 3}, 23)},
            .f = [](const Tensors& in) {
              const Routed x = dispatch(in[0], ints({2, 0, 3}, {1, 3}), 4);
              return Tensors{combine(x, in[1])};
            }});
  add_case(
      "combine", "WeightsOfTheRouter",
      {.inputs = {normal({5, 3}, 24), normal({5, 4}, 25)},
       .f = [](const Tensors& in) {
         const Tensor weights =
             router_weights(in[1], unbalanced(), rule(false, 2, 1, 1, false));
         return Tensors{combine(dispatch(in[0], unbalanced(), 4), weights)};
       }});
  return cases;
}

}  // namespace tapeline
