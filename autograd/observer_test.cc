#include "autograd/observer.h"

#include <map>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "autograd/tape.h"
#include "gtest/gtest.h"

namespace tapeline {
namespace {

struct Recorder : Observer {
  std::map<std::string, std::vector<float>> values, gradients;
  std::map<std::string, std::vector<int32_t>> choices;
  Tensor instead;

  void value(const char* name, const std::string& path,
             const Tensor& x) override {
    values[path + "/" + name] = x.to_vector<float>();
  }
  void gradient(const char* name, const std::string& path,
                const Tensor& dx) override {
    gradients[path + "/" + name] = dx.to_vector<float>();
  }
  Tensor choice(const char* name, const std::string& path,
                const Tensor& ids) override {
    choices[path + "/" + name] = ids.to_vector<int32_t>();
    return instead ? instead : ids;
  }
};

TEST(Observer, SeesValueAndGradientWithTheirPath) {
  Recorder recorder;
  const ObserverScope scope(recorder);
  Tape tape;
  const Tensor x = tape.input(Tensor::from<float>({1, 2}, {2}));
  const Tensor loss = record(tape, [&] {
    LayerScope layer("layers", 3);
    return sum(scale(observe("hidden", scale(x, 2)), 5));
  });
  ParameterGradients grads;
  const std::vector<Tensor> dx = tape.backward(loss, grads);
  EXPECT_EQ(recorder.values["layers.3/hidden"], (std::vector<float>{2, 4}));
  EXPECT_EQ(recorder.gradients["layers.3/hidden"], (std::vector<float>{5, 5}));
  EXPECT_EQ(dx[0].to_vector<float>(), (std::vector<float>{10, 10}));
}

TEST(Observer, WithoutOneNothingIsRecorded) {
  Tape tape;
  const Tensor x = tape.input(Tensor::from<float>({1}, {1}));
  bool made = false;
  record(tape, [&] {
    observe("hidden", x);
    observe_with("scores", [&] {
      made = true;
      return x;
    });
    return 0;
  });
  EXPECT_EQ(tape.nodes(), 0);
  EXPECT_FALSE(made);
}

TEST(Observer, ItsChoiceIsTaken) {
  const Tensor logits = Tensor::from<float>({3, 2, 1}, {1, 3});
  RouterRule rule;
  rule.top_k = 2;
  Recorder recorder;
  recorder.instead = Tensor::from<int32_t>({2, 1}, {1, 2});
  {
    const ObserverScope scope(recorder);
    EXPECT_EQ(choose_experts(logits, {}, rule).to_vector<int32_t>(),
              (std::vector<int32_t>{2, 1}));
  }
  EXPECT_EQ(recorder.choices["/router_ids"], (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(choose_experts(logits, {}, rule).to_vector<int32_t>(),
            (std::vector<int32_t>{0, 1}));
}

TEST(ObserverDeathTest, AChoiceOfAnotherShapeEnds) {
  Recorder recorder;
  recorder.instead = Tensor::from<int32_t>({2}, {1});
  const ObserverScope scope(recorder);
  EXPECT_DEATH(observe_choice("ids", Tensor::from<int32_t>({1, 2}, {2})),
               "the observer gave");
}

}  // namespace
}  // namespace tapeline
