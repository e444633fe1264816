// What ops promise beyond their gradients (those: //tests/gradcheck).
#include "autograd/ops.h"

#include <cmath>
#include <memory>
#include <random>
#include <sstream>

#include "autograd/anomaly.h"
#include "autograd/observer.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

using Floats = std::vector<float>;
using Tensors = std::vector<Tensor>;

Tensor normal(const Shape& shape, uint32_t seed, DType dtype = DType::kF32) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw;
  Floats values(static_cast<size_t>(shape.elements()));
  for (float& v : values) v = draw(random);
  return cast(Tensor::from(values, shape), dtype);
}
Parameter weight(const Shape& shape, uint32_t seed, DType dtype = DType::kF32) {
  Parameter p(shape);
  p.set_value("w" + std::to_string(seed), normal(shape, seed, dtype));
  return p;
}
Tensor ints(const std::vector<int32_t>& values, const Shape& shape) {
  return Tensor::from(values, shape);
}
Floats floats(const Tensor& x) {
  return x ? cast(x.detach(), DType::kF32).to_vector<float>() : Floats{};
}

// A small model in which gradients meet: residuals, a tied head, routed rows.
struct Model {
  DType dtype;
  Parameter table = weight({11, 4}, 1, dtype), norm = weight({4}, 2, dtype),
            proj = weight({4, 4}, 3, dtype), up = weight({3, 6, 4}, 4, dtype),
            down = weight({3, 4, 3}, 5, dtype),
            router = weight({3, 4}, 6, DType::kF32);

  std::vector<Parameter> parameters() const {
    return {table, norm, proj, up, down, router};
  }
  Tensor loss(const Tensor& noise) const {
    const Tensor x = embedding(ints({1, 6, 0, 10, 3}, {5}), table) + noise;
    const Tensor h = rms_norm(x, norm, 1e-3);
    const Tensor y = x + linear(mul(h, h), proj);
    const Tensor experts = ints({0, 1, 1, 0, 0, 2, 1, 0, -1, 1}, {5, 2});
    RouterRule rule;
    rule.top_k = 2;
    const Tensor logits = linear(cast(y, DType::kF32), router);
    const Routed rows = dispatch(y, experts, 3);
    const Routed hidden = routed_swiglu(grouped_linear(rows, up));
    const Tensor out = y + combine(grouped_linear(hidden, down),
                                   router_weights(logits, experts, rule));
    const Tensor z = attach(out, z_loss(logits, {}), 0.01);
    return linear_cross_entropy(z, table, ints({6, 0, -100, 3, 6}, {5}),
                                Tensor::full({5}, DType::kF32, 0.25))
        .loss;
  }
};

struct Step {
  Floats loss;
  std::vector<Floats> gradients;  // of the noise, then of parameters
  bool operator==(const Step&) const = default;
};
enum class Way { kBoth, kParts, kRetained };
Step run(const Model& model, Way way) {
  Tape tape;
  const Tensor noise = tape.input(normal({5, 4}, 7, model.dtype));
  const Tensor loss = record(tape, [&] { return model.loss(noise); });
  ParameterGradients grads;
  Tensors dx;
  const std::vector<Seed> seeds = {{loss, Tensor::full({1}, DType::kF32, 1)}};
  if (way == Way::kParts) {
    dx = tape.backward_inputs(seeds, grads);
    for (const Parameter& p : model.parameters())
      EXPECT_FALSE(grads.reached(p));
    tape.backward_weights(grads);
  } else {
    dx = tape.backward(seeds, grads,
                       way == Way::kRetained ? Retain::kYes : Retain::kNo);
  }
  Step out{floats(loss), {floats(dx[0])}};
  for (const Parameter& p : model.parameters()) {
    out.gradients.push_back(floats(grads.combined(p)));
    EXPECT_FALSE(out.gradients.back().empty()) << p.name();
  }
  return out;
}

TEST(Ops, InputThenWeightPartsGiveTheBitsOfBothInEveryDtype) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const Model model{dtype};
    const Step both = run(model, Way::kBoth);
    ASSERT_TRUE(std::isfinite(both.loss[0]));
    EXPECT_EQ(both, run(model, Way::kParts)) << dtype;
    EXPECT_EQ(both, run(model, Way::kRetained)) << dtype;
    EXPECT_EQ(both, run(model, Way::kBoth)) << dtype;
  }
}

TEST(Ops, KeepTheirDtypeAndGradientsTheirActivations) {
  const Model model{DType::kBf16};
  Tape tape;
  const Tensor noise = tape.input(normal({5, 4}, 7, DType::kBf16));
  const Tensor loss = record(tape, [&] { return model.loss(noise); });
  EXPECT_EQ(loss.dtype(), DType::kF32);
  ParameterGradients grads;
  EXPECT_EQ(tape.backward(loss, grads)[0].dtype(), DType::kBf16);
  for (const Parameter& p : model.parameters()) {
    EXPECT_EQ(grads.combined(p).dtype(), DType::kF32) << p.name();
  }
}

TEST(Ops, InterleavedTapesGiveTheBitsOfTapesAlone) {
  const Model model{DType::kF32};
  const Step alone = run(model, Way::kBoth);
  for (const bool ascending : {true, false}) {
    Tape tapes[2] = {Tape("0"), Tape("1")};
    Tensor loss[2];
    for (int i = 0; i < 2; ++i) {
      const Tensor noise = tapes[i].input(normal({5, 4}, 7));
      loss[i] = record(tapes[i], [&] { return model.loss(noise); });
    }
    for (const int i : ascending ? std::vector{0, 1} : std::vector{1, 0}) {
      ParameterGradients grads;
      EXPECT_EQ(floats(tapes[i].backward(loss[i], grads)[0]),
                alone.gradients[0]);
      for (size_t p = 0; p < 6; ++p) {
        EXPECT_EQ(floats(grads.combined(model.parameters()[p])),
                  alone.gradients[p + 1]);
      }
    }
  }
}

// Moves every saved tensor into a copy, so that nothing is shared by accident.
class CopyingHooks : public SavedTensorHooks {
 public:
  SavedHandle pack(Tensor& kept) override {
    ++packed;
    kept = kept.clone();
    return {};
  }
  Tensor unpack(SavedHandle, const Tensor& kept) override {
    return kept.clone();
  }
  int packed = 0;
};

TEST(Ops, GiveTheSameBitsThroughHooksThatCopy) {
  for (const Way way : {Way::kBoth, Way::kParts, Way::kRetained}) {
    const Model model{DType::kF32};
    const Step plain = run(model, way);
    const auto hooks = std::make_shared<CopyingHooks>();
    const HookScope scope(hooks);
    EXPECT_EQ(run(model, way), plain);
    EXPECT_GT(hooks->packed, 10);
  }
}

TEST(Ops, LeaveNoNodeAndNoStorageBehind) {
  const Model model{DType::kF32};
  const int64_t nodes = live_nodes(), storages = Storage::live();
  for (int step = 0; step < 12; ++step) {
    Tape tape;
    const Tensor noise = tape.input(normal({5, 4}, 7));
    const Tensor loss = record(tape, [&] { return model.loss(noise); });
    ParameterGradients grads;
    if (step % 3 == 0) tape.backward(loss, grads);
    if (step % 3 == 1) tape.backward_inputs({{loss, loss.clone()}}, grads);
  }
  EXPECT_EQ(live_nodes(), nodes);
  EXPECT_EQ(Storage::live(), storages);
}

TEST(Ops, WithoutATapeSaveNothing) {
  const Model model{DType::kF32};
  const int64_t nodes = live_nodes(), storages = Storage::live();
  const Tensor loss = model.loss(normal({5, 4}, 7));
  EXPECT_FALSE(loss.requires_grad);
  EXPECT_EQ(live_nodes(), nodes);
  EXPECT_EQ(Storage::live(), storages + 1);
}

TEST(Ops, ShadowModeMarksWhatAGradientWouldReach) {
  const GradModeScope shadow(GradMode::kShadow);
  const Model model{DType::kF32};
  const int64_t nodes = live_nodes();
  EXPECT_TRUE(model.loss(normal({5, 4}, 7)).requires_grad);
  EXPECT_EQ(live_nodes(), nodes);
  for (Parameter p : model.parameters()) p.set_trainable(false);
  EXPECT_FALSE(model.loss(normal({5, 4}, 7)).requires_grad);
}

TEST(Ops, FrozenParametersSaveNoInputsAndGetNoAccumulators) {
  const auto saved = [](bool trainable) {
    Device device(1);
    const DeviceScope scope(device);
    Parameter w = weight({3, 1 << 12}, 1);
    w.set_trainable(trainable);
    Tape tape;
    Tensor x = tape.input(Tensor::zeros({4, 1 << 12}, DType::kF32));
    const Tensor y = record(tape, [&] { return linear(x, w); });
    ParameterGradients grads;
    const std::vector<Seed> seeds = {{y, y.clone()}};
    x = Tensor();  // only the tape may still hold it
    const int64_t live = device.pool().stats().live;
    EXPECT_TRUE(tape.backward(seeds, grads)[0]);
    EXPECT_EQ(grads.reached(w), trainable);
    return live >= (4 << 14);
  };
  EXPECT_TRUE(saved(true));
  EXPECT_FALSE(saved(false));
}

// fp32 products of bf16 values are exact, so fp32 copies give the same logits
// and weight gradients; dx is rounded once.
TEST(Ops, RouterLogitsAreFp32BesideBf16) {
  const Tensor x = normal({5, 4}, 1, DType::kBf16);
  const Parameter w = weight({3, 4}, 2, DType::kBf16);
  Parameter wide(Shape{3, 4});
  wide.set_value("wide", cast(w.value(), DType::kF32));
  Tape tape, wide_tape;
  const Tensor in = tape.input(x),
               wide_in = wide_tape.input(cast(x, DType::kF32));
  const Tensor y = record(tape, [&] { return router_logits(in, w); });
  const Tensor wide_y =
      record(wide_tape, [&] { return linear(wide_in, wide); });
  ASSERT_EQ(y.dtype(), DType::kF32);
  EXPECT_EQ(floats(y), floats(wide_y));
  const Tensor dy = normal({5, 3}, 3);
  ParameterGradients grads, wide_grads;
  const Tensor dx = tape.backward({{y, dy}}, grads)[0];
  const Tensor wide_dx = wide_tape.backward({{wide_y, dy}}, wide_grads)[0];
  ASSERT_EQ(dx.dtype(), DType::kBf16);
  EXPECT_EQ(floats(dx), floats(cast(wide_dx, DType::kBf16)));
  EXPECT_EQ(floats(grads.combined(w)), floats(wide_grads.combined(wide)));
}

TEST(Ops, AllKeysAreThoseOfATokensOwnSequence) {
  const DsaSelection all = select_all_keys(Sequence::packed({0, 2, 5}));
  EXPECT_EQ(all.ids_TK.shape(), Shape({5, 3}));
  EXPECT_EQ(all.ids_TK.to_vector<int32_t>(),
            (std::vector<int32_t>{0, -1, -1, 0, 1, -1, 2, -1, -1, 2, 3, -1, 2,
                                  3, 4}));
}

TEST(Ops, EmbeddingGivesThePaddingRowNoGradient) {
  const Parameter table = weight({4, 2}, 1);
  auto [y, tape] = record([&] {
    return embedding(ints({1, 3, 1}, {3}), table, 3);
  });
  EXPECT_EQ(floats(y.slice(0, 1, 2)), floats(table.value().slice(0, 3, 4)));
  ParameterGradients grads;
  tape.backward({{y, Tensor::full({3, 2}, DType::kF32, 1)}}, grads);
  EXPECT_EQ(floats(grads.combined(table)), (Floats{0, 0, 2, 2, 0, 0, 0, 0}));
}

// Logits are made 1024 tokens at a time.
TEST(Ops, CrossEntropyOfManyTokensIsTheSumOfItsChunks) {
  constexpr int64_t kTokens = 1024 + 7;
  const Parameter w = weight({5, 3}, 1);
  const Tensor x = normal({kTokens, 3}, 2);
  std::vector<int32_t> labels(kTokens);
  for (size_t t = 0; t < labels.size(); ++t) {
    labels[t] = t % 9 == 0 ? -100 : static_cast<int32_t>(t % 5);
  }
  const Tensor label = ints(labels, {kTokens});
  const Tensor ones = Tensor::full({kTokens}, DType::kF32, 1);
  const auto gradients = [&](int64_t begin, int64_t end) {
    Tape tape;
    const Tensor in = tape.input(x.slice(0, begin, end));
    const CrossEntropy ce = record(tape, [&] {
      return linear_cross_entropy(in, w, label.slice(0, begin, end),
                                  ones.slice(0, begin, end));
    });
    ParameterGradients grads;
    const Floats dx = floats(tape.backward(ce.loss, grads)[0]);
    return std::tuple(floats(ce.token_loss_T), dx, floats(grads.combined(w)));
  };
  const auto [loss, dx, dw] = gradients(0, kTokens);
  auto [loss1, dx1, dw1] = gradients(0, 1000);
  const auto [loss2, dx2, dw2] = gradients(1000, kTokens);
  loss1.insert(loss1.end(), loss2.begin(), loss2.end());
  dx1.insert(dx1.end(), dx2.begin(), dx2.end());
  for (size_t i = 0; i < loss.size(); ++i) {
    EXPECT_NEAR(loss[i], loss1[i], 1e-5f) << i;
  }
  for (size_t i = 0; i < dx.size(); ++i) EXPECT_NEAR(dx[i], dx1[i], 1e-5f) << i;
  for (size_t i = 0; i < dw.size(); ++i) {
    EXPECT_NEAR(dw[i], dw1[i] + dw2[i], 2e-3f) << i;
  }
}

// The head of a model, bf16: its loss's gradient is made before it is known.
struct Head {
  Parameter w = weight({11, 4}, 1, DType::kBf16);
  Tensor x = normal({5, 4}, 2, DType::kBf16);
  Tensor label = ints({6, 0, -100, 3, 10}, {5});
  Tensor share = normal({5}, 3);

  CrossEntropy operator()(const Tensor& in) const {
    return linear_cross_entropy(in, w, label, share);
  }
};
struct HeadStep {
  Floats token_loss, dx, dw;
  bool operator==(const HeadStep&) const = default;
};
HeadStep step_of(const Head& head) {
  Tape tape;
  const Tensor in = tape.input(head.x);
  const CrossEntropy ce = record(tape, [&] { return head(in); });
  ParameterGradients grads;
  const Floats dx = floats(tape.backward(ce.loss, grads)[0]);
  return {floats(ce.token_loss_T), dx, floats(grads.combined(head.w))};
}

TEST(Ops, CrossEntropyMultipliesByItsGradientAgainOnEveryBackward) {
  const Head head;
  const HeadStep once = step_of(head);
  Tape tape;
  const Tensor in = tape.input(head.x);
  const Tensor loss = record(tape, [&] { return head(in).loss; });
  // Powers of two round nothing.
  for (const float seed : {4.0f, 1.0f, -0.5f, 1.0f}) {
    ParameterGradients grads;
    const Tensor dloss = Tensor::full({1}, DType::kF32, seed);
    HeadStep got{once.token_loss,
                 floats(tape.backward({{loss, dloss}}, grads, Retain::kYes)[0]),
                 floats(grads.combined(head.w))};
    for (float& v : got.dx) v /= seed;
    for (float& v : got.dw) v /= seed;
    EXPECT_EQ(got, once) << seed;
  }
}

TEST(Ops, CrossEntropyHasTheSameLossWhetherRecordedOrNot) {
  const Head head;
  EXPECT_EQ(floats(head(head.x).token_loss_T), step_of(head).token_loss);
}

TEST(Ops, CrossEntropyKeepsOneGradientOfItsLogits) {
  const Head head;
  Tape tape;
  const Tensor in = tape.input(head.x);
  record(tape, [&] { return head(in).loss; });
  std::ostringstream out;
  tape.print(out);
  const int bytes = 5 * 11 * 2 + 5 * 4 * 2;  // and its input
  EXPECT_NE(out.str().find("saved " + std::to_string(bytes) + " bytes"),
            std::string::npos)
      << out.str();
}

struct LogitsSeen : Observer {
  void value(const char* name, const std::string&, const Tensor& x) override {
    if (std::string(name) == "logits") logits = floats(x);
  }
  void gradient(const char*, const std::string&, const Tensor&) override {}
  Tensor choice(const char*, const std::string&, const Tensor& ids) override {
    return ids;
  }
  Floats logits;
};

TEST(Ops, CrossEntropyShowsLogitsThatItWouldOverwriteAndKeepsItsBits) {
  const Head head;
  const HeadStep alone = step_of(head);
  LogitsSeen seen;
  const ObserverScope scope(seen);
  EXPECT_EQ(step_of(head), alone);
  EXPECT_EQ(seen.logits, floats(linear(head.x, head.w)));
}

TEST(Ops, CrossEntropyWithoutLabelsIsZeroWithZeroGradients) {
  const Parameter w = weight({5, 3}, 1);
  Tape tape;
  const Tensor x = tape.input(normal({2, 3}, 2));
  const CrossEntropy ce = record(tape, [&] {
    return linear_cross_entropy(x, w, ints({-100, -100}, {2}),
                                Tensor::full({2}, DType::kF32, 1));
  });
  EXPECT_FALSE(ce.token_loss_T.requires_grad);
  EXPECT_EQ(floats(ce.loss), Floats{0});
  ParameterGradients grads;
  EXPECT_EQ(floats(tape.backward(ce.loss, grads)[0]), Floats(6));
  EXPECT_EQ(floats(grads.combined(w)), Floats(15));
}

TEST(Ops, TakeNoTokensAtAll) {
  const Parameter table = weight({5, 3}, 1), norm = weight({3}, 2);
  auto [loss, tape] = record([&] {
    const Tensor x = rms_norm(embedding(ints({}, {0}), table), norm, 1e-6);
    const Tensor none = Tensor::empty({0}, DType::kF32);
    return linear_cross_entropy(x, table, ints({}, {0}), none).loss;
  });
  EXPECT_EQ(floats(loss), Floats{0});
  ParameterGradients grads;
  tape.backward(loss, grads);
  EXPECT_EQ(floats(grads.combined(table)), Floats(15));
}

TEST(Ops, AttachLeavesTheValueAndSendsTheLossItsFactor) {
  Tape tape;
  const Tensor x = tape.input(normal({2, 2}, 1)),
               loss = tape.input(Tensor::full({1}, DType::kF32, 5));
  const Tensor y = record(tape, [&] { return attach(x, loss, 0.125); });
  EXPECT_EQ(floats(y), floats(x));
  ParameterGradients grads;
  const Tensors dx =
      tape.backward({{y, Tensor::full({2, 2}, DType::kF32, 7)}}, grads);
  EXPECT_EQ(floats(dx[0]), (Floats{7, 7, 7, 7}));
  EXPECT_EQ(floats(dx[1]), Floats{0.125});
}

// Rows that routing leaves unwritten hold whatever was there before.
TEST(Ops, AnomalyModeIgnoresRowsThatNoTokenGoesTo) {
  Device device(1);
  device.pool().set_poison(true);
  const DeviceScope on(device);
  const Model model{DType::kF32};
  const AnomalyScope scope;
  run(model, Way::kBoth);
  EXPECT_FALSE(scope.first()) << to_string(*scope.first());
}

TEST(Ops, AnomalyModeNamesTheOpAndLayerThatOverflows) {
  const AnomalyScope scope;
  Tape tape;
  const Tensor x = tape.input(Tensor::full({2, 2}, DType::kF32, 1e30));
  record(tape, [&] {
    Tensor y = x;
    for (int i = 0; i < 4; ++i) {
      const LayerScope layer("layers", i);
      y = i == 2 ? mul(y, y) : scale(y, 1);
    }
    return y;
  });
  ASSERT_TRUE(scope.first());
  EXPECT_EQ(to_string(*scope.first()),
            "inf in forward of mul at layers.2, tensor 0, element 0");
}

TEST(Ops, DoNotWriteTheirInputs) {
  const Model model{DType::kF32};
  const Tensor noise = normal({5, 4}, 7);
  const uint32_t version = noise.storage()->version();
  Tape tape;
  const Tensor x = tape.input(noise);
  const Tensor loss = record(tape, [&] { return model.loss(x); });
  ParameterGradients grads;
  tape.backward(loss, grads);
  EXPECT_EQ(noise.storage()->version(), version);
}

TEST(OpsDeathTest, NameTheOpAndBothShapesOrDtypes) {
  const Tensor a = normal({2, 3}, 1), b = normal({3, 2}, 2),
               half = normal({2, 3}, 3, DType::kBf16);
  EXPECT_DEATH(a + b, "\\[add\\].*\\[2, 3\\].*\\[3, 2\\]");
  EXPECT_DEATH(mul(a, half), "\\[mul\\].*f32\\[2, 3\\].*bf16\\[2, 3\\]");
  EXPECT_DEATH(a + half, "\\[add\\].*f32\\[2, 3\\].*bf16\\[2, 3\\]");
  EXPECT_DEATH(linear(half, weight({4, 3}, 4)),
               "\\[linear\\].*bf16\\[2, 3\\].*f32\\[4, 3\\]");
  EXPECT_DEATH(linear(b, weight({4, 3}, 4)),
               "\\[linear\\].*\\[3, 2\\].*\\[4, 3\\]");
  EXPECT_DEATH(cast(a, DType::kI32), "\\[cast\\] f32\\[2, 3\\] to i32");
  EXPECT_DEATH(attach(a, b, 1), "\\[attach\\].*one number.*f32\\[3, 2\\]");
  EXPECT_DEATH(split(a, {1, 1}), "\\[split\\].*f32\\[2, 3\\]");
  EXPECT_DEATH(split(a, {2, 2}), "\\[split\\].*f32\\[2, 3\\]");
  EXPECT_DEATH(split(a, {-1, 4}), "\\[split\\].*f32\\[2, 3\\]");
  EXPECT_DEATH(concat({}), "\\[concat\\]");
  EXPECT_DEATH(concat({a, b}), "\\[concat\\].*f32\\[2, 3\\].*f32\\[3, 2\\]");
  EXPECT_DEATH(concat({a, half}),
               "\\[concat\\].*f32\\[2, 3\\].*bf16\\[2, 3\\]");
  EXPECT_DEATH(expand_heads(a, 0), "\\[expand_heads\\] f32\\[2, 3\\] to 0");
  EXPECT_DEATH(reshape(a, {7}), "\\[reshape\\].*\\[2, 3\\].*\\[7\\]");
}

TEST(OpsDeathTest, SelectionsMadeByHandNeedAnInverseToRecord) {
  Tape tape;
  const Tensor q = tape.input(normal({2, 1, 4}, 1));
  const DsaSelection bare{ints({0, 1}, {2, 1}), nullptr};
  EXPECT_DEATH(
      record(tape,
             [&] {
               return sparse_attention(q, normal({2, 4}, 2), bare, 1, 4).o_THV;
             }),
      "\\[sparse_attention\\].*inverse");
}

}  // namespace
}  // namespace tapeline
