#include "autograd/optimizer.h"

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "runtime/access.h"
#include "runtime/json.h"

namespace tapeline {
namespace {

// autograd/testdata/make_optimizer.py
const Json& golden() {
  static const Json& json =
      *new Json(read_json("autograd/testdata/optimizer.json").value());
  return json;
}
const Json& run_of(std::string_view kind) {
  for (const Json& run : golden().find("runs")->array()) {
    if (run.find("kind")->string() == kind) return run;
  }
  std::abort();
}

template <class A>
std::vector<A> numbers(const Json& json) {
  std::vector<A> out;
  for (const Json& x : json.array()) out.push_back(static_cast<A>(x.number()));
  return out;
}

// The tensors of the golden file: "heads" and "tall" lie in one parameter
// each; "bias" and "embed" too.
struct Model {
  std::map<std::string, Parameter> parameters;
  std::vector<OptimizedTensor> tensors;
};

const std::map<std::string, std::vector<int64_t>>& muon_rows() {
  static const auto& rows = *new std::map<std::string, std::vector<int64_t>>{
      {"heads", {3, 2}}, {"tall", {7}}, {"unused", {2}}};
  return rows;
}

template <class A>
Model make_model(const Json& run) {
  Model model;
  for (const Json& entry : golden().find("tensors")->array()) {
    const std::string& name = entry.array()[0].string();
    Shape shape;
    for (const Json& d : entry.array()[1].array()) shape.push_back(d.integer());
    Parameter& p = model.parameters.emplace(name, shape).first->second;
    p.set_value(
        name, Tensor::from(numbers<A>(*run.find("start")->find(name)), shape));
    OptimizedTensor t{name, shape, 0, p, {}};
    if (const auto rows = muon_rows().find(name); rows != muon_rows().end()) {
      t.muon_rows = rows->second;
    }
    model.tensors.push_back(t);
  }
  return model;
}

template <class A>
void add_gradient(ParameterGradients& grads, const Parameter& parameter,
                  const std::vector<A>& values, int site = 0) {
  const Tensor& sum = grads.accumulator(parameter, site);
  std::vector<A> added = sum.to_vector<A>();
  for (size_t i = 0; i < values.size(); ++i) added[i] += values[i];
  sum.assign(added);
}

// Both dtypes against doubles: f32 keeps the fp32 rounding of a few operations.
template <class A>
void follows_golden(OptimizerOptions::Kind kind, double tolerance) {
  const Json& run =
      run_of(kind == OptimizerOptions::Kind::kMuon ? "muon" : "adamw");
  Model model = make_model<A>(run);
  Optimizer optimizer(model.tensors, {.kind = kind});
  ParameterGradients grads;
  int k = 0;
  for (const Json& step : run.find("steps")->array()) {
    SCOPED_TRACE(k);
    for (auto& [name, parameter] : model.parameters) {
      if (name == "unused" && k > 0) continue;  // no backward reaches it
      add_gradient(grads, parameter,
                   numbers<A>(*step.find("grads")->find(name)));
    }
    const StepReport report = optimizer.step(grads, step.find("lr")->number());
    EXPECT_FALSE(report.skipped);
    EXPECT_NEAR(report.grad_norm, step.find("norm")->number(), 1e-6);
    EXPECT_NEAR(report.clip, step.find("clip")->number(), 1e-7);
    for (auto& [name, parameter] : model.parameters) {
      const std::vector<A> got = parameter.value().template to_vector<A>();
      const std::vector<double> want =
          numbers<double>(*step.find("values")->find(name));
      for (size_t i = 0; i < want.size(); ++i) {
        EXPECT_NEAR(got[i], want[i], tolerance) << name << " " << i;
      }
    }
    grads.zero();
    ++k;
  }
  EXPECT_EQ(optimizer.updates(), 3);
}

TEST(AdamW, FollowsTheFormulaInF64) {
  follows_golden<double>(OptimizerOptions::Kind::kAdamW, 1e-14);
}
TEST(AdamW, FollowsTheFormulaInF32) {
  follows_golden<float>(OptimizerOptions::Kind::kAdamW, 3e-7);
}
TEST(Muon, OrthogonalisesEachRowBlockInF64) {
  follows_golden<double>(OptimizerOptions::Kind::kMuon, 1e-13);
}
TEST(Muon, OrthogonalisesEachRowBlockInF32) {
  follows_golden<float>(OptimizerOptions::Kind::kMuon, 1e-6);
}

TEST(Muon, RowBlocksRepeatTheirHeights) {
  const std::vector<RowBlock> blocks = row_blocks({3, 1}, 8);
  ASSERT_EQ(blocks.size(), 4u);
  EXPECT_EQ(blocks[1].begin, 3);
  EXPECT_EQ(blocks[1].end, 4);
  EXPECT_EQ(blocks[3].begin, 7);
  EXPECT_EQ(blocks[3].end, 8);
  EXPECT_DEATH(row_blocks({3, 2}, 8), "row blocks");
}

Parameter parameter_of(const std::string& name, const std::vector<float>& v) {
  Parameter p({static_cast<int64_t>(v.size())});
  p.set_value(name, Tensor::from(v, p.shape));
  return p;
}

TEST(Optimizer, NotFiniteGradientsChangeNothing) {
  Parameter a = parameter_of("a", {1, 2}), b = parameter_of("b", {3});
  Optimizer optimizer({{"a", a.shape, 0, a, {}}, {"b", b.shape, 0, b, {}}}, {});
  ParameterGradients grads;
  add_gradient<float>(grads, a, {0.5, -0.5});
  optimizer.step(grads, 0.1);
  const std::vector<float> before = a.value().to_vector<float>();
  const std::vector<OptimizerState> state = optimizer.state();
  const std::vector<float> m = state[0].value.to_vector<float>();
  for (float bad : {NAN, INFINITY, -INFINITY}) {
    grads.zero();
    add_gradient<float>(grads, a, {0.25, 0.5});
    add_gradient<float>(grads, b, {bad});
    const StepReport report = optimizer.step(grads, 0.1);
    EXPECT_TRUE(report.skipped);
    EXPECT_FALSE(std::isfinite(report.grad_norm));
  }
  EXPECT_EQ(a.value().to_vector<float>(), before);
  EXPECT_EQ(state[0].value.to_vector<float>(), m);
  grads.zero();
  add_gradient<float>(grads, a, {0.25, 0.5});
  EXPECT_TRUE(optimizer.step(grads, 0.1, /*loss=*/NAN).skipped);
  EXPECT_EQ(a.value().to_vector<float>(), before);
  EXPECT_EQ(optimizer.skipped(), 4);
  EXPECT_EQ(optimizer.updates(), 1);
}

// queue() and settle() are step() in two parts, and what they count is what was
// taken: a step behind one that was not has the bits of a run without it.
TEST(Optimizer, QueuedUpdatesAreCountedWhenTheyAreSettled) {
  for (const auto kind :
       {OptimizerOptions::Kind::kAdamW, OptimizerOptions::Kind::kMuon}) {
    const auto run = [&](bool queued, bool with_bad_step) {
      Parameter w({2, 3});
      w.set_value("w", Tensor::from<float>({1, -2, 3, 4, 5, -6}, {2, 3}));
      Optimizer optimizer({{"w", w.shape, 0, w, {2}}}, {.kind = kind});
      ParameterGradients grads;
      const auto step = [&](float factor, float loss) {
        grads.zero();
        add_gradient<float>(grads, w,
                            {factor, 2 * factor, -factor, 0, factor, 1});
        if (!queued) return optimizer.step(grads, 0.1, loss);
        return optimizer.settle(
            optimizer.queue(grads, 0.1, {Tensor::from<float>({loss}, {1})})
                .to_vector<double>());
      };
      EXPECT_FALSE(step(0.5f, 3).skipped);
      if (with_bad_step) {
        EXPECT_TRUE(step(0.25f, INFINITY).skipped);
        EXPECT_TRUE(step(NAN, 1).skipped);
      }
      const StepReport last = step(0.75f, 2);
      EXPECT_FALSE(last.skipped);
      EXPECT_LT(last.clip, 1);
      EXPECT_EQ(optimizer.updates(), 2);
      EXPECT_EQ(optimizer.skipped(), with_bad_step ? 2 : 0);
      return w.value().to_vector<float>();
    };
    const std::vector<float> want = run(false, false);
    EXPECT_EQ(run(true, false), want);
    EXPECT_EQ(run(false, true), want);
    EXPECT_EQ(run(true, true), want);
  }
}

// Experts are updated in one piece: the bits of piece by piece.
TEST(Optimizer, OneLaunchForAllTensorsOfAParameterChangesNoBit) {
  const auto run = [](bool split) {
    Parameter p({4, 2, 3});
    std::vector<float> values, gradient;
    for (int i = 0; i < 24; ++i) {
      values.push_back(0.1f * static_cast<float>(i - 7));
      gradient.push_back(0.3f * static_cast<float>((i * 5) % 11 - 4));
    }
    p.set_value("p", Tensor::from(values, p.shape));
    std::vector<OptimizedTensor> tensors;
    for (int e = 0; e < 4; ++e) {
      // A missing tensor is left alone, and the others go one by one.
      if (split && e == 3) break;
      tensors.push_back({"e" + std::to_string(e), {2, 3}, 6 * e, p, {}});
    }
    Optimizer optimizer(tensors, {.max_norm = 0});
    ParameterGradients grads;
    for (int k = 0; k < 3; ++k) {
      grads.zero();
      add_gradient<float>(grads, p, gradient);
      optimizer.step(grads, 0.1);
    }
    std::vector<float> out = p.value().to_vector<float>();
    if (split) {
      EXPECT_EQ(std::vector<float>(out.begin() + 18, out.end()),
                std::vector<float>(values.begin() + 18, values.end()));
    }
    out.resize(18);
    return out;
  };
  EXPECT_EQ(run(false), run(true));
}

TEST(OptimizerDeath, UpdatesAreSettledOneByOne) {
  Parameter w({1});
  w.set_value("w", Tensor::from<float>({1}, {1}));
  Optimizer optimizer({{"w", w.shape, 0, w, {}}}, {});
  ParameterGradients grads;
  EXPECT_DEATH(optimizer.settle({0, 1}), "no update was queued");
  optimizer.queue(grads, 0.1, {});
  EXPECT_DEATH(optimizer.queue(grads, 0.1, {}), "was not settled");
}

TEST(Optimizer, NormAddsSitesAndTensorsInNameOrder) {
  Parameter a = parameter_of("a", {0, 0}), b = parameter_of("b", {0});
  // Names against the order of the list.
  Optimizer optimizer({{"z", b.shape, 0, b, {}}, {"y", a.shape, 0, a, {}}},
                      {.max_norm = 0});
  EXPECT_EQ(optimizer.tensors()[0].name, "y");
  ParameterGradients grads;
  add_gradient<float>(grads, a, {1, 2}, 0);
  add_gradient<float>(grads, a, {1, 2}, 3);
  add_gradient<float>(grads, b, {4});
  const StepReport report = optimizer.step(grads, 0.1);
  EXPECT_DOUBLE_EQ(report.grad_norm, std::sqrt(4 + 16 + 16.0));
  EXPECT_EQ(report.clip, 1);
}

TEST(Optimizer, BlocksOfOneParameterAreTensorsOfTheirOwn) {
  Parameter experts({2, 1, 2});
  experts.set_value("experts", Tensor::from<float>({1, 1, 1, 1}, {2, 1, 2}));
  Optimizer optimizer(
      {{"e.1", {1, 2}, 2, experts, {}}, {"e.0", {1, 2}, 0, experts, {}}},
      {.adamw = {.weight_decay = 0}, .max_norm = 0});
  ParameterGradients grads;
  add_gradient<float>(grads, experts, {1, 1, 0, 0});
  optimizer.step(grads, 0.25);
  const std::vector<float> w = experts.value().to_vector<float>();
  EXPECT_NEAR(w[0], 0.75, 1e-6);
  EXPECT_EQ(w[2], 1);
  const std::vector<OptimizerState> state = optimizer.state();
  ASSERT_EQ(state.size(), 4u);
  EXPECT_EQ(state[0].name, "e.0");
  EXPECT_EQ(state[0].kind, "m");
  EXPECT_NEAR(state[0].value.to_vector<float>()[1], 0.1, 1e-7);
  EXPECT_EQ(state[2].value.to_vector<float>()[1], 0);
}

TEST(Optimizer, UnreachedParametersDecayAndVectorsDoNot) {
  Parameter w({1, 1});
  w.set_value("w", Tensor::from<float>({1}, {1, 1}));
  Parameter b = parameter_of("b", {1});
  Optimizer optimizer({{"w", w.shape, 0, w, {}}, {"b", b.shape, 0, b, {}}},
                      {.adamw = {.weight_decay = 0.5}});
  ParameterGradients grads;
  optimizer.step(grads, 0.5);
  EXPECT_FLOAT_EQ(w.value().to_vector<float>()[0], 0.75f);
  EXPECT_EQ(b.value().to_vector<float>()[0], 1);
}

// A value of bf16 alone would lose updates below half its rounding step.
TEST(Optimizer, Bf16ParametersFollowAnFp32Master) {
  Parameter p({1, 1});
  const Tensor value = Tensor::full({1, 1}, DType::kBf16, 1);
  p.set_value("p", value);
  Optimizer optimizer({{"p", p.shape, 0, p, {}}},
                      {.adamw = {.weight_decay = 0}});
  ParameterGradients grads;
  for (int i = 0; i < 8; ++i) {
    grads.zero();
    add_gradient<float>(grads, p, {0.5});
    optimizer.step(grads, 1e-3);
  }
  const float after{p.value().to_vector<bf16>()[0]};
  EXPECT_NEAR(after, 1 - 8e-3, 2e-3);
  EXPECT_NE(after, 1);
  const OptimizerState master = optimizer.state().back();
  EXPECT_EQ(master.kind, "master");
  EXPECT_NEAR(master.value.to_vector<float>()[0], 1 - 8e-3, 1e-6);
}

}  // namespace
}  // namespace tapeline
