#include "tests/gradcheck/cases.h"

namespace tapeline {

OpCases arithmetic_cases() {
  OpCases cases;
  const auto add_case = [&](const char* op, const char* what,
                            GradcheckCase check) {
    cases.push_back({op, what, std::move(check)});
  };
  for (const bool dense : {true, false}) {
    const char* what = dense ? "Dense" : "Strided";
    const Tensor a = dense ? normal({3, 5}, 1) : strided({3, 5}, 1);
    const Tensor b = dense ? normal({3, 5}, 2) : transposed({3, 5}, 2);
    add_case("add", what, {.inputs = {a, b}, .f = [](const Tensors& in) {
                             return Tensors{in[0] + in[1]};
                           }});
    add_case("mul", what, {.inputs = {a, b}, .f = [](const Tensors& in) {
                             return Tensors{mul(in[0], in[1])};
                           }});
    add_case("scale", what, {.inputs = {a}, .f = [](const Tensors& in) {
                               return Tensors{scale(in[0], -1.75)};
                             }});
    add_case("sum", what, {.inputs = {b}, .f = [](const Tensors& in) {
                             return Tensors{sum(mul(in[0], in[0]))};
                           }});
    // f64 values pass through f32: the function is exact but for its rounding,
    // so a long step makes the differences good.
    add_case("cast", what,
             {.inputs = {a},
              .f =
                  [](const Tensors& in) {
                    const Tensor narrow = cast(in[0], DType::kF32);
                    return Tensors{cast(narrow, DType::kF64)};
                  },
              .step = 0.25,
              .tolerance = 2e-6});
  }
  const Tensor one = normal({1}, 3), four = normal({2, 3, 1, 2}, 4);
  add_case("add", "OneTensorTwice",
           {.inputs = {one},
            .f = [](const Tensors& in) { return Tensors{in[0] + in[0]}; }});
  add_case("mul", "OneTensorTwice",
           {.inputs = {four},
            .f = [](const Tensors& in) { return Tensors{mul(in[0], in[0])}; }});
  const Tensor constant = normal({2, 3, 1, 2}, 5);
  add_case("mul", "ByAConstant",
           {.inputs = {four}, .f = [constant](const Tensors& in) {
              return Tensors{mul(in[0], constant), mul(constant, in[0])};
            }});
  add_case("sum", "OfOneElement", {.inputs = {one}, .f = [](const Tensors& in) {
                                     return Tensors{sum(in[0])};
                                   }});
  add_case("cast", "ToItself", {.inputs = {four}, .f = [](const Tensors& in) {
                                  return Tensors{cast(in[0], DType::kF64)};
                                }});
  const auto loss_of = [](const Tensors& in) { return sum(mul(in[1], in[1])); };
  const Tensor x = strided({3, 2}, 6), aux = normal({5}, 7);
  add_case("attach", "Loss",
           {.inputs = {x, aux},
            .f =
                [loss_of](const Tensors& in) {
                  return Tensors{attach(in[0], loss_of(in), 0.625)};
                },
            .attached =
                [loss_of](const Tensors& in) {
                  return 0.625 * loss_of(in).to_vector<double>()[0];
                }});
  // The main path may be a constant: the loss still gets its gradient.
  add_case("attach", "LossToAConstant",
           {.inputs = {aux},
            .f =
                [x](const Tensors& in) {
                  return Tensors{attach(x, sum(mul(in[0], in[0])), -3)};
                },
            .attached =
                [](const Tensors& in) {
                  return -3 * sum(mul(in[0], in[0])).to_vector<double>()[0];
                }});
  return cases;
}

OpCases shape_cases() {
  OpCases cases;
  const auto add_case = [&](const char* op, const char* what,
                            GradcheckCase check) {
    cases.push_back({op, what, std::move(check)});
  };
  // Each op's result is multiplied by constants of its own shape, so that
  // gradients that land in the wrong place differ.
  const Tensor c = normal({2, 3, 2, 2}, 11);
  for (const bool dense : {true, false}) {
    const Tensor x = dense ? normal({4, 6}, 12) : strided({4, 6}, 12);
    add_case("reshape", dense ? "Dense" : "Strided",
             {.inputs = {x}, .f = [c](const Tensors& in) {
                const Tensor y = reshape(in[0], {2, 3, 2, 2});
                return Tensors{mul(y, c), y};
              }});
    add_case("split", dense ? "Dense" : "Strided",
             {.inputs = {x}, .f = [](const Tensors& in) {
                return split(in[0], {1, 0, 3, 2});
              }});
    add_case("split", dense ? "OnePartUnused" : "OnePartUnusedStrided",
             {.inputs = {x}, .f = [](const Tensors& in) {
                const Tensors parts = split(in[0], {1, 3, 2});
                return Tensors{mul(parts[2], parts[2]), parts[0]};
              }});
    add_case(
        "concat", dense ? "Dense" : "Strided",
        {.inputs = {x, transposed({4, 3}, 13)}, .f = [](const Tensors& in) {
           const Tensor y = concat({in[1], in[0], in[1]});
           return Tensors{mul(y, y)};
         }});
  }
  const Tensor rank3 = strided({2, 3, 4}, 14), constant = normal({2, 3, 1}, 15);
  add_case("concat", "WithAConstant",
           {.inputs = {rank3}, .f = [constant](const Tensors& in) {
              const Tensor y = concat({constant, in[0]});
              return Tensors{mul(y, y)};
            }});
  add_case("concat", "OfSplitParts",
           {.inputs = {rank3}, .f = [](const Tensors& in) {
              const Tensors parts = split(in[0], {3, 1});
              return Tensors{concat({parts[1], parts[0]})};
            }});
  for (const int64_t tokens : {1, 5}) {
    const Tensor k = tokens == 1 ? normal({1, 4}, 16) : strided({5, 4}, 16);
    const Tensor q = normal({tokens, 3, 4}, 17);
    add_case("expand_heads", tokens == 1 ? "OneToken" : "Strided",
             {.inputs = {k, q}, .f = [](const Tensors& in) {
                return Tensors{mul(expand_heads(in[0], 3), in[1])};
              }});
  }
  add_case("expand_heads", "ThenConcat",
           {.inputs = {normal({5, 2}, 18), normal({5, 3, 4}, 19)},
            .f = [](const Tensors& in) {
              return Tensors{concat({in[1], expand_heads(in[0], 3)})};
            }});
  add_case("reshape", "OfExpandedHeads",
           {.inputs = {normal({5, 2}, 20)}, .f = [](const Tensors& in) {
              return Tensors{reshape(expand_heads(in[0], 3), {5, 6})};
            }});
  return cases;
}

}  // namespace tapeline
