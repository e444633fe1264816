#include "autograd/saved_tensor.h"

#include <map>
#include <optional>
#include <sstream>
#include <string>

#include "autograd/test_ops.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

using test_ops::factor;
using test_ops::parameter;
using test_ops::times;
using test_ops::values;
using test_ops::weigh;
using Floats = std::vector<float>;
using Log = std::vector<std::string>;

Tensor mapped(const Tensor& x, float by, float plus) {
  Floats out = x.to_vector<float>();
  for (float& v : out) v = by * v + plus;
  return Tensor::from(out, x.shape());
}

// Keeps by * x + plus instead of x.
class AffineHooks : public SavedTensorHooks {
 public:
  AffineHooks(std::string name, float by, float plus, Log* log)
      : name_(std::move(name)), by_(by), plus_(plus), log_(log) {}
  const char* name() const override { return "affine"; }
  SavedHandle pack(Tensor& kept) override {
    log_->push_back("pack " + name_);
    kept = mapped(kept, by_, plus_);
    return {{++packed_, 0}};
  }
  Tensor unpack(SavedHandle handle, const Tensor& kept) override {
    log_->push_back("unpack " + name_ + std::to_string(handle.words[0]));
    return mapped(kept, 1 / by_, -plus_ / by_);
  }
  void drop(SavedHandle handle) override {
    log_->push_back("drop " + name_ + std::to_string(handle.words[0]));
  }

 private:
  std::string name_;
  float by_, plus_;
  Log* log_;
  uint64_t packed_ = 0;
};

// Takes tensors away and gives them back.
class TakingHooks : public SavedTensorHooks {
 public:
  const char* name() const override { return "taking"; }
  SavedHandle pack(Tensor& kept) override {
    EXPECT_FALSE(kept.requires_grad);
    taken_[++packed_] = std::exchange(kept, Tensor());
    return {{packed_, 0}};
  }
  Tensor unpack(SavedHandle handle, const Tensor& kept) override {
    EXPECT_FALSE(kept);
    return taken_.at(handle.words[0]);
  }
  void drop(SavedHandle handle) override { taken_.erase(handle.words[0]); }
  size_t taken() const { return taken_.size(); }

 private:
  std::map<uint64_t, Tensor> taken_;
  uint64_t packed_ = 0;
};

// Leaves tensors as they are.
class PassingHooks : public SavedTensorHooks {
 public:
  SavedHandle pack(Tensor&) override { return {}; }
  Tensor unpack(SavedHandle, const Tensor& kept) override { return kept; }
};

// d(a b)/da for a on the tape and b a constant.
struct Product {
  Tape tape{"product"};
  Tensor a = tape.input(values<float>({1, 2, 3}));
  Tensor b = values<float>({5, 6, 7});
  Tensor y;

  void run() {
    y = record(tape, [&] { return times(a, b); });
  }
  Floats da() {
    ParameterGradients grads;
    return tape.backward({{y, values<float>({1, 1, 1})}}, grads)[0]
        .to_vector<float>();
  }
};

TEST(SavedTensor, KeepsTheTensorItselfWithoutHooks) {
  Product p;
  const int64_t storages = Storage::live();
  p.run();
  EXPECT_EQ(Storage::live(), storages + 1);  // y
  EXPECT_EQ(p.da(), (Floats{5, 6, 7}));
}

TEST(SavedTensor, PacksFromInnerToOuterAndUnpacksBack) {
  Log log;
  Product p;
  {
    const HookScope outer(std::make_shared<AffineHooks>("O", 2, 0, &log));
    const HookScope inner(std::make_shared<AffineHooks>("I", 1, 1, &log));
    EXPECT_EQ(hook_depth(), 2);
    p.run();
  }
  EXPECT_EQ(hook_depth(), 0);
  // times saves a, then b.
  EXPECT_EQ(log, (Log{"pack I", "pack O", "pack I", "pack O"}));
  log.clear();
  // 2 (b + 1) was kept: undoing it in another order would not give b.
  EXPECT_EQ(p.da(), (Floats{5, 6, 7}));
  EXPECT_EQ(log, (Log{"unpack O2", "unpack I2", "unpack O1", "unpack I1",
                      "drop O2", "drop I2", "drop O1", "drop I1"}));
}

TEST(SavedTensor, ComposesAnyNumberOfHooks) {
  Log log;
  std::vector<std::unique_ptr<HookScope>> scopes;
  for (int i = 0; i < 9; ++i) {
    scopes.push_back(std::make_unique<HookScope>(
        std::make_shared<AffineHooks>("h", 2, static_cast<float>(i), &log)));
  }
  Product p;
  p.run();
  while (!scopes.empty()) scopes.pop_back();
  EXPECT_EQ(p.da(), (Floats{5, 6, 7}));
  EXPECT_EQ(log.size(), 2u * 9 * 3);
}

TEST(SavedTensor, AsksNoOuterHooksOnceTheTensorIsGone) {
  Log log;
  const auto taking = std::make_shared<TakingHooks>();
  Product p;
  {
    const HookScope outer(std::make_shared<AffineHooks>("O", 2, 0, &log));
    const HookScope inner(taking);
    p.run();
  }
  EXPECT_EQ(taking->taken(), 2u);
  EXPECT_EQ(p.da(), (Floats{5, 6, 7}));
  EXPECT_EQ(taking->taken(), 0u);
  EXPECT_EQ(log, Log{});
}

TEST(SavedTensor, UnpacksAnyNumberOfTimes) {
  const auto taking = std::make_shared<TakingHooks>();
  Product p;
  {
    const HookScope scope(taking);
    p.run();
  }
  ParameterGradients grads;
  const std::vector<Seed> seeds = {{p.y, values<float>({1, 1, 1})}};
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(p.tape.backward(seeds, grads, Retain::kYes)[0].to_vector<float>(),
              (Floats{5, 6, 7}));
    EXPECT_EQ(taking->taken(), 2u);
  }
}

TEST(SavedTensor, DropsWhenBackwardNeverRuns) {
  const auto taking = std::make_shared<TakingHooks>();
  {
    Product p;
    const HookScope scope(taking);
    p.run();
    EXPECT_EQ(taking->taken(), 2u);
  }
  EXPECT_EQ(taking->taken(), 0u);
}

TEST(SavedTensor, HooksLiveAsLongAsTheTapeThatUsedThem) {
  std::weak_ptr<TakingHooks> alive;
  {
    Product p;
    {
      const auto taking = std::make_shared<TakingHooks>();
      alive = taking;
      const HookScope scope(taking);
      p.run();
    }
    EXPECT_FALSE(alive.expired());
    EXPECT_EQ(p.da(), (Floats{5, 6, 7}));
    EXPECT_FALSE(alive.expired());
  }
  EXPECT_TRUE(alive.expired());
}

TEST(SavedTensor, ScopesNestAndMayRepeatHooks) {
  Log log;
  const auto hooks = std::make_shared<AffineHooks>("h", 2, 1, &log);
  Product p;
  {
    const HookScope outer(hooks);
    {
      const HookScope inner(hooks);
      EXPECT_EQ(hook_depth(), 2);
    }
    EXPECT_EQ(hook_depth(), 1);
    const HookScope again(hooks);
    p.run();
  }
  EXPECT_EQ(p.da(), (Floats{5, 6, 7}));
}

// Hooks that open and close a scope of their own while they run.
class ScopingHooks : public PassingHooks {
 public:
  SavedHandle pack(Tensor& kept) override {
    const HookScope scope(std::make_shared<PassingHooks>());
    return PassingHooks::pack(kept);
  }
  Tensor unpack(SavedHandle handle, const Tensor& kept) override {
    scope.reset();
    return PassingHooks::unpack(handle, kept);
  }
  std::optional<HookScope> scope;
};

TEST(SavedTensor, AScopeMayEndWhileItsHooksUnpack) {
  const auto hooks = std::make_shared<ScopingHooks>();
  Product p;
  hooks->scope.emplace(hooks);
  p.run();
  EXPECT_EQ(hook_depth(), 1);
  EXPECT_EQ(p.da(), (Floats{5, 6, 7}));
  EXPECT_EQ(hook_depth(), 0);
  hooks->scope.reset();
}

TEST(SavedTensor, KeepsUndefinedTensorsWithoutAskingHooks) {
  struct Keeping : Node {
    SavedTensor nothing;
    void backward_inputs(Backward& b) override {
      EXPECT_FALSE(nothing);
      EXPECT_FALSE(nothing.unpack());
      b.add(0, b.grad());
    }
  };
  Log log;
  const HookScope scope(std::make_shared<AffineHooks>("h", 2, 1, &log));
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const Tensor y = record(tape, [&] {
    Tensor out = x.clone();
    push<Keeping>("keeping", {&x}, {&out})->nothing.save(Tensor());
    return out;
  });
  ParameterGradients grads;
  EXPECT_TRUE(tape.backward({{y, values<float>({1})}}, grads)[0]);
  EXPECT_EQ(log, Log{});
}

std::string printed(const Tape& tape) {
  std::ostringstream out;
  tape.print(out);
  return out.str();
}

TEST(SavedTensor, CountsItsBytesForTheNode) {
  Product p;
  p.run();
  EXPECT_EQ(printed(p.tape), "0  times    [3]  saved 24 bytes, by none\n");
}

TEST(SavedTensor, TheTapePrintsWhoPackedWhatANodeSaved) {
  Log log;
  Product p;
  {
    const HookScope takes(std::make_shared<TakingHooks>());
    const HookScope outer(std::make_shared<AffineHooks>("O", 2, 0, &log));
    const HookScope passes(std::make_shared<PassingHooks>());
    p.run();
  }
  const std::string want =
      "0  times    [3]  saved 24 bytes, by affine, by taking\n";
  EXPECT_EQ(printed(p.tape), want);
  ParameterGradients grads;
  p.tape.backward({{p.y, values<float>({1, 1, 1})}}, grads, Retain::kYes);
  EXPECT_EQ(printed(p.tape), want);
}

TEST(SavedTensor, MayBeWrittenOnceItsCopyIsKept) {
  Log log;
  Product p;
  {
    const HookScope scope(std::make_shared<AffineHooks>("h", 1, 0, &log));
    p.run();
  }
  p.b.set_zero();
  EXPECT_EQ(p.da(), (Floats{5, 6, 7}));
}

TEST(SavedTensorDeathTest, WritingWhatIsKeptNamesOpTensorAndLayer) {
  Product p;
  {
    const LayerScope layer("layers", 3);
    p.run();
  }
  p.b.set_zero();
  EXPECT_DEATH(p.da(),
               "\\[times\\] a tensor saved for backward was written in place: "
               "f32\\[3\\], layer 'layers.3'");
}

TEST(SavedTensorDeathTest, WritingWhatIsKeptIsFoundWithHooksToo) {
  Product p;
  {
    const HookScope scope(std::make_shared<PassingHooks>());
    p.run();
  }
  p.b.set_zero();
  EXPECT_DEATH(p.da(), "\\[times\\] a tensor saved for backward was written");
}

TEST(SavedTensorDeathTest, WritingThroughAViewIsFound) {
  Product p;
  p.run();
  write<float>(p.b.slice(0, 2, 3)).view()(0) = 0;
  EXPECT_DEATH(p.da(), "\\[times\\] a tensor saved for backward was written");
}

TEST(SavedTensorDeathTest, WritingAParameterBeforeBackwardIsFound) {
  Tape tape;
  Parameter w = parameter("model.w", values<float>({2, 3}));
  const Tensor x = tape.input(values<float>({1, 1}));
  const Tensor y = record(tape, [&] { return weigh(x, w); });
  ParameterGradients grads;
  w.value().set_zero();
  EXPECT_DEATH(tape.backward({{y, values<float>({1, 1})}}, grads),
               "parameter 'model.w', f32\\[2\\], was written between forward "
               "and backward");
  w.set_value("model.w", values<float>({2, 3}));
  EXPECT_DEATH(tape.backward({{y, values<float>({1, 1})}}, grads),
               "parameter 'model.w'");
}

TEST(SavedTensorDeathTest, BelongsToAnOpThatIsBeingRecorded) {
  SavedTensor saved;
  EXPECT_DEATH(saved.save(values<float>({1})), "outside of an op");
}

TEST(SavedTensorDeathTest, IsSavedOnce) {
  struct Twice : Node {
    SavedTensor x;
    void backward_inputs(Backward&) override {}
  };
  Tape tape;
  const Tensor x = tape.input(values<float>({1}));
  const RecordScope scope(tape);
  Tensor y = x.clone();
  auto* n = push<Twice>("twice", {&x}, {&y});
  n->x.save(x);
  EXPECT_DEATH(n->x.save(x), "saved once");
}

}  // namespace
}  // namespace tapeline
