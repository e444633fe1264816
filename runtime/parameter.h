// Parameter and Buffer: named state of a module.
//
// Both are specs (shape and how to fill) until somebody gives them a value, so
// sharding, slicing and loading are visitors that run before memory exists.
// From then on copies are handles on one state: its address is the parameter's
// identity (key()). A Parameter receives gradients while trainable; a Buffer
// is saved and loaded but never differentiated, decayed or clipped.
// Writing a value is not thread-safe.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "runtime/tensor.h"

namespace tapeline {

struct Initializer {
  enum class Kind : uint8_t { kNormal, kConstant };
  Kind kind = Kind::kNormal;
  double value = 0.02;  // standard deviation, or the constant

  static Initializer normal(double std) { return {Kind::kNormal, std}; }
  static Initializer constant(double v) { return {Kind::kConstant, v}; }
};

class Parameter {
 public:
  struct State {
    std::string name;
    Tensor value;
    bool trainable = true;
  };

  Parameter() = default;
  Parameter(Shape extents, Initializer init = {})  // NOLINT: spec in one line
      : shape(std::move(extents)), initializer(init) {}

  Shape shape;
  Initializer initializer;

  bool defined() const { return state_ != nullptr; }
  const State* key() const { return state_.get(); }
  const Tensor& value() const {
    CHECK(defined()) << "a parameter of shape " << shape
                     << " is used before initialize() or load()";
    return state_->value;
  }
  const std::string& name() const {
    CHECK(defined());
    return state_->name;
  }
  bool trainable() const { return defined() && state_->trainable; }
  void set_trainable(bool trainable) {
    CHECK(defined());
    state_->trainable = trainable;
  }
  void set_value(std::string name, Tensor value) {
    CHECK(value.shape() == shape)
        << name << " is " << value << ", the model wants " << shape;
    if (!state_) state_ = std::make_shared<State>();
    state_->name = std::move(name);
    state_->value = std::move(value);
  }

 private:
  std::shared_ptr<State> state_;
};

class Buffer {
 public:
  Buffer() = default;
  Buffer(Shape extents, double fill_value = 0)  // NOLINT: spec in one line
      : shape(std::move(extents)), fill(fill_value) {}

  Shape shape;
  double fill = 0;

  bool defined() const { return state_ != nullptr; }
  const Tensor& value() const {
    CHECK(defined()) << "a buffer of shape " << shape
                     << " is used before initialize() or load()";
    return *state_;
  }
  void set_value(Tensor value) {
    CHECK(value.shape() == shape) << value << " for a buffer of " << shape;
    state_ = std::make_shared<Tensor>(std::move(value));
  }

 private:
  std::shared_ptr<Tensor> state_;
};

}  // namespace tapeline
