#include "tests/gradcheck/cases.h"

namespace tapeline {

OpCases dense_cases() {
  OpCases cases;
  const auto add_case = [&](const char* op, const char* what,
                            GradcheckCase check) {
    cases.push_back({op, what, std::move(check)});
  };
  struct Input {
    const char* what;
    Tensor x_T7;
  };
  for (const Input& input :
       {Input{"Dense", normal({4, 7}, 1)}, Input{"Strided", strided({4, 7}, 2)},
        Input{"Transposed", transposed({4, 7}, 3)},
        Input{"OneToken", normal({1, 7}, 4)},
        Input{"OneTokenStrided", strided({1, 7}, 5)}}) {
    const Parameter w = weight({3, 7}, 6);
    add_case(
        "linear", input.what,
        {.inputs = {input.x_T7},
         .parameters = {w},
         .f = [w](const Tensors& in) { return Tensors{linear(in[0], w)}; }});
    add_case("router_logits", input.what,
             {.inputs = {input.x_T7},
              .parameters = {w},
              .f = [w](const Tensors& in) {
                return Tensors{router_logits(in[0], w)};
              }});
    const Parameter scale = weight({7}, 7);
    add_case("rms_norm", input.what,
             {.inputs = {input.x_T7},
              .parameters = {scale},
              .f = [scale](const Tensors& in) {
                return Tensors{rms_norm(in[0], scale, 1e-2)};
              }});
    const Parameter bias = weight({7}, 8);
    add_case("layer_norm", input.what,
             {.inputs = {input.x_T7},
              .parameters = {scale, bias},
              .f = [scale, bias](const Tensors& in) {
                return Tensors{layer_norm(in[0], scale, bias, 1e-2)};
              }});
  }
  for (const bool strided_rows : {false, true}) {
    const Tensor x = strided_rows ? strided({4, 10}, 9) : normal({4, 10}, 9);
    add_case("swiglu", strided_rows ? "Strided" : "Dense",
             {.inputs = {x},
              .f = [](const Tensors& in) { return Tensors{swiglu(in[0])}; }});
  }
  add_case("swiglu", "OneTokenOfWidthTwo",
           {.inputs = {normal({1, 2}, 10)},
            .f = [](const Tensors& in) { return Tensors{swiglu(in[0])}; }});
  const Parameter w = weight({3, 7}, 11), norm_w = weight({5}, 12),
                  norm_b = weight({5}, 13);
  const Tensor constant = normal({4, 7}, 14);
  add_case(
      "linear", "OfAConstant",
      {.inputs = {}, .parameters = {w}, .f = [w, constant](const Tensors&) {
         return Tensors{linear(constant, w)};
       }});
  add_case("linear", "OneWeightTwice",
           {.inputs = {normal({4, 7}, 15), strided({2, 7}, 16)},
            .parameters = {w},
            .f = [w](const Tensors& in) {
              return Tensors{linear(in[0], w), linear(in[1], w)};
            }});
  add_case("linear", "OfSplitParts",
           {.inputs = {normal({4, 9}, 17)},
            .parameters = {w},
            .f = [w](const Tensors& in) {
              return Tensors{linear(split(in[0], {2, 7})[1], w)};
            }});
  for (const bool strided_rows : {false, true}) {
    const Tensor x =
        strided_rows ? strided({2, 3, 5}, 18) : normal({2, 3, 5}, 18);
    const char* what = strided_rows ? "StridedHeads" : "Heads";
    add_case("rms_norm", what,
             {.inputs = {x},
              .parameters = {norm_w},
              .f = [norm_w](const Tensors& in) {
                return Tensors{rms_norm(in[0], norm_w, 1e-2)};
              }});
    add_case("layer_norm", what,
             {.inputs = {x},
              .parameters = {norm_w, norm_b},
              .f = [norm_w, norm_b](const Tensors& in) {
                return Tensors{layer_norm(in[0], norm_w, norm_b, 1e-2)};
              }});
  }
  add_case("rms_norm", "Vector",
           {.inputs = {normal({5}, 19)},
            .parameters = {norm_w},
            .f = [norm_w](const Tensors& in) {
              return Tensors{rms_norm(in[0], norm_w, 1e-2)};
            }});

  // Multi-head latent attention's two uses of kv_b_proj: 3 heads of 4 + 2 rows.
  const Parameter kv_b = weight({18, 5}, 20);
  const HeadRows absorb{3, 0, 4, HeadRows::Direction::kTransposed};
  const HeadRows output{3, 4, 6, HeadRows::Direction::kForward};
  for (const int64_t tokens : {1, 4}) {
    const bool one = tokens == 1;
    add_case("head_linear", one ? "AbsorbOneToken" : "Absorb",
             {.inputs = {one ? normal({1, 3, 4}, 21) : strided({4, 3, 4}, 21)},
              .parameters = {kv_b},
              .f = [kv_b, absorb](const Tensors& in) {
                return Tensors{head_linear(in[0], kv_b, absorb)};
              }});
    add_case("head_linear", one ? "OutputOneToken" : "Output",
             {.inputs = {one ? normal({1, 3, 5}, 22) : strided({4, 3, 5}, 22)},
              .parameters = {kv_b},
              .f = [kv_b, output](const Tensors& in) {
                return Tensors{head_linear(in[0], kv_b, output)};
              }});
  }
  add_case("head_linear", "BothDirectionsOfOneWeight",
           {.inputs = {normal({4, 3, 4}, 23)},
            .parameters = {kv_b},
            .f = [=](const Tensors& in) {
              const Tensor q = head_linear(in[0], kv_b, absorb);
              return Tensors{q, head_linear(q, kv_b, output)};
            }});
  add_case("head_linear", "OfExpandedHeads",
           {.inputs = {normal({4, 5}, 24)},
            .parameters = {kv_b},
            .f = [=](const Tensors& in) {
              return Tensors{head_linear(expand_heads(in[0], 3), kv_b, output)};
            }});
  add_case("head_linear", "OneHeadOfAllRows",
           {.inputs = {normal({2, 1, 5}, 25)},
            .parameters = {kv_b},
            .f = [kv_b](const Tensors& in) {
              return Tensors{head_linear(in[0], kv_b, {1, 0, 18})};
            }});

  const Parameter table = weight({6, 3}, 26);
  add_case("embedding", "RepeatedIds",
           {.parameters = {table}, .f = [table](const Tensors&) {
              return Tensors{embedding(ints({2, 5, 2, 0, 2}, {5}), table)};
            }});
  add_case("embedding", "OneToken",
           {.parameters = {table}, .f = [table](const Tensors&) {
              return Tensors{embedding(ints({3}, {1}), table)};
            }});
  // Also a tied head: one weight, two kinds of use.
  add_case("embedding", "TiedToALinear",
           {.parameters = {table}, .f = [table](const Tensors&) {
              const Tensor x = embedding(ints({4, 1, 4}, {3}), table);
              return Tensors{linear(x, table)};
            }});
  return cases;
}

}  // namespace tapeline
