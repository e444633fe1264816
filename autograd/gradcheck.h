// Gradients of recorded functions against central differences (for tests).
//
//   Gradcheck check({.inputs = {x, y}, .parameters = {w},
//                    .f = [&](const auto& in) { ... return outputs; }});
//   EXPECT_TRUE(check.gradients_match());
//   EXPECT_TRUE(check.errors_are_caught());
//
// The differentiated number is L = sum_o <c_o, f(x)_o> with random c_o, so that
// no error hides in a sum over equal cotangents. Every element of every input
// and parameter is moved by +-step, in f64; inputs may be strided views.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "autograd/tape.h"
#include "gtest/gtest.h"
#include "runtime/parameter.h"
#include "runtime/tensor.h"

namespace tapeline {

struct GradcheckCase {
  std::vector<Tensor> inputs = {};         // f64, any strides but 0
  std::vector<Parameter> parameters = {};  // f64, trainable, all that f uses
  // Outputs require grad. Called often: must give the same bits each time.
  std::function<std::vector<Tensor>(const std::vector<Tensor>&)> f;
  // A number added to L that backward follows without a seed (attach).
  std::function<double(const std::vector<Tensor>&)> attached = nullptr;
  double step = 1e-5;
  // Of an element's error, as a part of the root mean square of its tensor's
  // gradient plus the element. With values near 1 the differences are good to
  // about 1e-9; a function that rounds to f32 inside needs more, and a larger
  // step.
  double tolerance = 1e-6;
};

// What one node adds to the gradient of one of its inputs or of a parameter.
struct Contribution {
  int node = 0;  // position on the tape
  std::string op;
  int input = -1;
  int parameter = -1;  // position in GradcheckCase::parameters
};
// "mul input 1", "linear parameter 0"
std::string to_string(const Contribution& contribution);

class Gradcheck {
 public:
  // Computes the differences.
  explicit Gradcheck(GradcheckCase checked);

  // backward() agrees with the differences; backward_inputs() alone gives the
  // same bits to inputs and nothing to parameters, and backward_weights() then
  // the same bits to parameters; a retained backward can be repeated.
  testing::AssertionResult gradients_match() const;

  // Goes back node by node, with one contribution scaled by 1.01, for every
  // contribution but zeros: each must bring gradients that no
  // longer agree. Adds those that were caught to `caught`.
  testing::AssertionResult errors_are_caught(
      std::vector<Contribution>* caught = nullptr) const;

 private:
  struct Gradients {
    std::vector<std::vector<double>> inputs, parameters;
  };
  struct Recording {
    Tape tape;
    std::vector<Seed> seeds;
  };

  Recording record_case() const;
  double loss() const;
  std::vector<double> differences(const Tensor& x) const;
  Gradients values(const std::vector<Tensor>& inputs,
                   ParameterGradients& parameters) const;
  std::string disagreement(const Gradients& got) const;
  Gradients replay(const Contribution* scaled,
                   std::vector<Contribution>* seen) const;

  GradcheckCase case_;
  std::vector<Tensor> cotangents_;
  Gradients numeric_;
};

}  // namespace tapeline
