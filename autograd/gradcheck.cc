#include "autograd/gradcheck.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <sstream>
#include <utility>

#include "kernels/elementwise/elementwise.h"
#include "runtime/access.h"

namespace tapeline {
namespace {

constexpr double kScale = 1.01;

// A view of element i in row-major order.
Tensor element_of(const Tensor& x, int64_t i) {
  Tensor element = x;
  for (int d = x.rank() - 1; d >= 0; --d) {
    element = element.slice(d, i % x.size(d), i % x.size(d) + 1);
    i /= x.size(d);
  }
  return element;
}

std::vector<double> to_doubles(const Tensor& x) {
  std::vector<double> out;
  dispatch_float(x.dtype(), [&]<class T>() {
    for (T value : x.to_vector<T>()) out.push_back(static_cast<double>(value));
  });
  return out;
}

Tensor normal_like(const Tensor& x, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> draw;
  const Tensor out = Tensor::empty(x.shape(), x.dtype());
  dispatch_float(x.dtype(), [&]<class T>() {
    std::vector<T> values(static_cast<size_t>(x.elements()));
    for (T& value : values) value = T(static_cast<float>(draw(random)));
    out.assign(values);
  });
  return out;
}

Tensor scaled(const Tensor& x, double factor) {
  const Tensor y = Tensor::empty(x.shape(), x.dtype());
  dispatch_float(x.dtype(), [&]<class T>() {
    scale(launch(), factor, read<T>(x).view(), write<T>(y).view());
  });
  return y;
}

void add_into(Tensor& sum, const Tensor& x) {
  if (!sum) {
    sum = x.clone();
    return;
  }
  dispatch_float(x.dtype(), [&]<class T>() {
    accumulate(launch(), read<T>(x).view(), write<T>(sum).view());
  });
}

// Zeros, or what rounding makes of them.
bool negligible(const Tensor& x) {
  const std::vector<double> values = to_doubles(x);
  return std::all_of(values.begin(), values.end(),
                     [](double v) { return std::abs(v) < 1e-12; });
}

bool same_bits(const std::vector<std::vector<double>>& a,
               const std::vector<std::vector<double>>& b) {
  // Through bits: a NaN must not pass.
  const auto equal = [](double x, double y) {
    return std::bit_cast<uint64_t>(x) == std::bit_cast<uint64_t>(y);
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [&](const auto& x, const auto& y) {
                      return std::equal(x.begin(), x.end(), y.begin(), y.end(),
                                        equal);
                    });
}

// Why `got` is not the gradient that `expected` approximates; empty if it is.
std::string difference(const std::vector<double>& got,
                       const std::vector<double>& expected, double tolerance) {
  double squares = 0;
  for (double e : expected) squares += e * e;
  const double rms =
      std::sqrt(squares / std::max<double>(1, expected.size())) + 1e-6;
  std::ostringstream out;
  out.precision(12);
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = std::abs(got[i] - expected[i]);
    if (error <= tolerance * (rms + std::abs(expected[i]))) continue;
    out << "element " << i << " is " << got[i] << ", differences give "
        << expected[i];
    break;
  }
  return out.str();
}

}  // namespace

std::string to_string(const Contribution& c) {
  return c.op + (c.input >= 0 ? " input " + std::to_string(c.input)
                              : " parameter " + std::to_string(c.parameter));
}

Gradcheck::Gradcheck(GradcheckCase checked) : case_(std::move(checked)) {
  for (const Tensor& output : case_.f(case_.inputs)) {
    const auto seed = static_cast<uint32_t>(17 + cotangents_.size());
    cotangents_.push_back(normal_like(output, seed));
  }
  for (const Tensor& x : case_.inputs) {
    numeric_.inputs.push_back(differences(x));
  }
  for (const Parameter& p : case_.parameters) {
    numeric_.parameters.push_back(differences(p.value()));
  }
}

double Gradcheck::loss() const {
  const std::vector<Tensor> outputs = case_.f(case_.inputs);
  CHECK_EQ(outputs.size(), cotangents_.size());
  double total = case_.attached ? case_.attached(case_.inputs) : 0;
  for (size_t o = 0; o < outputs.size(); ++o) {
    const std::vector<double> y = to_doubles(outputs[o]);
    const std::vector<double> c = to_doubles(cotangents_[o]);
    for (size_t i = 0; i < y.size(); ++i) total += y[i] * c[i];
  }
  return total;
}

std::vector<double> Gradcheck::differences(const Tensor& x) const {
  CHECK(x.dtype() == DType::kF64) << "[gradcheck] wants f64, got " << x;
  const std::vector<double> values = x.to_vector<double>();
  std::vector<double> gradient;
  for (size_t i = 0; i < values.size(); ++i) {
    const Tensor element = element_of(x, static_cast<int64_t>(i));
    element.fill(values[i] + case_.step);
    const double above = loss();
    element.fill(values[i] - case_.step);
    const double below = loss();
    element.fill(values[i]);
    gradient.push_back((above - below) / (2 * case_.step));
  }
  return gradient;
}

Gradcheck::Recording Gradcheck::record_case() const {
  Recording out{Tape("gradcheck"), {}};
  std::vector<Tensor> handles;
  for (const Tensor& x : case_.inputs) handles.push_back(out.tape.input(x));
  const std::vector<Tensor> outputs =
      record(out.tape, [&] { return case_.f(handles); });
  for (size_t o = 0; o < outputs.size(); ++o) {
    out.seeds.push_back({outputs[o], cotangents_[o]});
  }
  return out;
}

Gradcheck::Gradients Gradcheck::values(const std::vector<Tensor>& inputs,
                                       ParameterGradients& parameters) const {
  Gradients out;
  const auto or_zeros = [](const Tensor& gradient, const Tensor& x) {
    return gradient ? to_doubles(gradient)
                    : std::vector<double>(static_cast<size_t>(x.elements()));
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    out.inputs.push_back(or_zeros(inputs[i], case_.inputs[i]));
  }
  for (const Parameter& p : case_.parameters) {
    out.parameters.push_back(or_zeros(parameters.combined(p), p.value()));
  }
  return out;
}

std::string Gradcheck::disagreement(const Gradients& got) const {
  for (size_t i = 0; i < numeric_.inputs.size(); ++i) {
    const std::string why =
        difference(got.inputs[i], numeric_.inputs[i], case_.tolerance);
    if (!why.empty()) return "input " + std::to_string(i) + ": " + why;
  }
  for (size_t p = 0; p < numeric_.parameters.size(); ++p) {
    const std::string why =
        difference(got.parameters[p], numeric_.parameters[p], case_.tolerance);
    if (!why.empty()) return "parameter " + std::to_string(p) + ": " + why;
  }
  return "";
}

testing::AssertionResult Gradcheck::gradients_match() const {
  Recording both = record_case();
  ParameterGradients grads;
  const std::vector<Tensor> dx =
      both.tape.backward(both.seeds, grads, Retain::kYes);
  const Gradients whole = values(dx, grads);
  if (const std::string why = disagreement(whole); !why.empty()) {
    return testing::AssertionFailure() << why;
  }
  ParameterGradients again;
  if (const Gradients second =
          values(both.tape.backward(both.seeds, again), again);
      !same_bits(second.inputs, whole.inputs) ||
      !same_bits(second.parameters, whole.parameters)) {
    return testing::AssertionFailure() << "a retained tape gives other bits";
  }
  Recording parts = record_case();
  ParameterGradients weights;
  const std::vector<Tensor> inputs =
      parts.tape.backward_inputs(parts.seeds, weights);
  for (const Parameter& p : case_.parameters) {
    if (weights.reached(p)) {
      return testing::AssertionFailure()
             << "backward_inputs() reached " << p.name();
    }
  }
  parts.tape.backward_weights(weights);
  const Gradients split = values(inputs, weights);
  if (!same_bits(split.inputs, whole.inputs)) {
    return testing::AssertionFailure()
           << "backward_inputs() gives inputs other bits than backward()";
  }
  if (!same_bits(split.parameters, whole.parameters)) {
    return testing::AssertionFailure()
           << "backward_weights() gives other bits than backward()";
  }
  return testing::AssertionSuccess();
}

// A second way back over the same nodes. To see what each node gives to each of
// its inputs, their slots are exchanged for fresh ones while it runs; its
// parameters get an accumulator of their own.
Gradcheck::Gradients Gradcheck::replay(const Contribution* scaled_one,
                                       std::vector<Contribution>* seen) const {
  Recording recording = record_case();
  Tape::State& tape = *recording.tape.state();
  tape.parts = Parts::kInputs;
  tape.retain = Retain::kYes;
  GradModeScope off(GradMode::kOff);
  std::vector<Tensor> sums(tape.next_slot);
  for (const Seed& seed : recording.seeds) {
    add_into(sums[seed.output.slot], seed.grad);
  }
  ParameterGradients parameters;
  const auto take = [&](Contribution c, const Tensor& gradient) {
    if (seen != nullptr && !negligible(gradient)) seen->push_back(c);
    const bool hit = scaled_one != nullptr && scaled_one->node == c.node &&
                     scaled_one->input == c.input &&
                     scaled_one->parameter == c.parameter;
    return hit ? scaled(gradient, kScale) : gradient;
  };
  for (int n = static_cast<int>(tape.nodes.size()) - 1; n >= 0; --n) {
    Node& node = *tape.nodes[static_cast<size_t>(n)];
    std::vector<Tensor> output_grads;
    bool reached = false;
    for (int o = 0; o < node.outputs; ++o) {
      output_grads.push_back(
          std::exchange(sums[node.output_slot + static_cast<uint32_t>(o)], {}));
      reached |= static_cast<bool>(output_grads.back());
    }
    if (!reached) continue;
    const std::vector<uint32_t> slots(node.input_slots,
                                      node.input_slots + node.inputs);
    tape.slots.assign(node.inputs + 1u, Tensor());
    node.output_slot = node.inputs + 1u;
    tape.slots.insert(tape.slots.end(), output_grads.begin(),
                      output_grads.end());
    for (uint32_t i = 0; i < node.inputs; ++i) {
      node.input_slots[i] = slots[i] == 0 ? 0 : i + 1;
    }
    ParameterGradients own;
    Backward b(tape, node, own);
    node.backward_inputs(b);
    if (node.has_weights()) b.run_weights();
    for (int i = 0; i < node.inputs; ++i) {
      const Tensor& gradient = tape.slots[static_cast<size_t>(i) + 1];
      if (!gradient) continue;
      add_into(sums[slots[static_cast<size_t>(i)]],
               take({n, node.name, i, -1}, gradient));
    }
    for (size_t p = 0; p < case_.parameters.size(); ++p) {
      const Parameter& parameter = case_.parameters[p];
      if (!own.reached(parameter)) continue;
      Tensor sum = parameters.accumulator(parameter, 0);
      add_into(sum, take({n, node.name, -1, static_cast<int>(p)},
                         own.combined(parameter)));
    }
    std::copy(slots.begin(), slots.end(), node.input_slots);
  }
  tape.slots.clear();
  std::vector<Tensor> inputs;
  for (uint32_t slot : tape.input_slots) inputs.push_back(sums[slot]);
  return values(inputs, parameters);
}

testing::AssertionResult Gradcheck::errors_are_caught(
    std::vector<Contribution>* caught) const {
  std::vector<Contribution> contributions;
  const std::string wrong = disagreement(replay(nullptr, &contributions));
  if (!wrong.empty()) {
    return testing::AssertionFailure() << "replayed unchanged, " << wrong;
  }
  if (contributions.empty()) {
    return testing::AssertionFailure() << "no node contributes anything";
  }
  for (const Contribution& c : contributions) {
    if (disagreement(replay(&c, nullptr)).empty()) {
      return testing::AssertionFailure()
             << to_string(c) << " scaled by " << kScale << " is not noticed";
    }
    if (caught != nullptr) caught->push_back(c);
  }
  return testing::AssertionSuccess();
}

}  // namespace tapeline
