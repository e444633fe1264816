#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "autograd/ops.h"
#include "autograd/ops/op.h"
#include "autograd/shape_rules.h"
#include "kernels/elementwise/elementwise.h"

namespace tapeline {
namespace {

using internal::with_last;

void copy_into(const Tensor& from, const Tensor& to) {
  dispatch_float(from.dtype(), [&]<class T>() {
    copy(launch(), read<T>(from).view(), write<T>(to).view());
  });
}

struct ReshapeNode : Node {
  Shape shape;
  void backward_inputs(Backward& b) override {
    b.add(0, b.grad().view_as(shape));
  }
};

struct SplitNode : Node {
  Shape shape;
  DType dtype = DType::kF32;
  std::vector<int64_t> sizes;
  void backward_inputs(Backward& b) override {
    Tensor dx = Tensor::empty(shape, dtype);
    int64_t begin = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const Tensor part = dx.slice(-1, begin, begin + sizes[i]);
      const Tensor& dy = b.grad(static_cast<int>(i));
      copy_into(dy ? dy : Tensor::zeros(part.shape(), dtype), part);
      begin += sizes[i];
    }
    b.add(0, std::move(dx));
  }
};

struct ConcatNode : Node {
  std::vector<int64_t> sizes;
  void backward_inputs(Backward& b) override {
    int64_t begin = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (b.needs(static_cast<int>(i))) {
        // A copy, so that the parts do not keep the whole gradient alive.
        b.add(static_cast<int>(i),
              b.grad().slice(-1, begin, begin + sizes[i]).clone());
      }
      begin += sizes[i];
    }
  }
};

struct ExpandHeadsNode : Node {
  int64_t heads = 1;
  void backward_inputs(Backward& b) override {
    const Tensor& dy = b.grad();
    Tensor dx = dy.slice(1, 0, 1).clone().view_as({dy.size(0), dy.size(2)});
    dispatch_float(dy.dtype(), [&]<class T>() {
      const auto from = read<T>(dy);
      const auto to = write<T>(dx);
      for (int64_t h = 1; h < heads; ++h) {
        const View<const T> head(from.view().data + h * dy.strides()[1],
                                 dx.shape(), {dy.strides()[0], 1});
        accumulate(launch(), head, to.view());
      }
    });
    b.add(0, std::move(dx));
  }
};

}  // namespace

Tensor reshape(const Tensor& x, const Shape& shape) {
  internal::checked(shape_rules::reshape(x.shape(), shape));
  Tensor y = (x.contiguous() ? x : x.clone()).view_as(shape);
  if (auto* n = push<ReshapeNode>("reshape", {&x}, {&y})) n->shape = x.shape();
  return y;
}

std::vector<Tensor> split(const Tensor& x, const std::vector<int64_t>& sizes) {
  CHECK_GE(x.rank(), 1) << "[split] " << x << " has no last dimension; ";
  std::vector<Tensor> parts;
  int64_t begin = 0;
  for (int64_t size : sizes) {
    CHECK(size >= 0 && begin + size <= x.size(-1))
        << "[split] sizes exceed the last dimension of " << x;
    parts.push_back(x.slice(-1, begin, begin + size));
    begin += size;
  }
  CHECK_EQ(begin, x.size(-1)) << "[split] sizes do not add up for " << x;
  std::vector<Tensor*> outputs;
  for (Tensor& part : parts) outputs.push_back(&part);
  if (auto* n = push<SplitNode>("split", {&x}, absl::MakeSpan(outputs))) {
    n->shape = x.shape();
    n->dtype = x.dtype();
    n->sizes = sizes;
  }
  return parts;
}

Tensor concat(const std::vector<Tensor>& parts) {
  CHECK(!parts.empty() && parts[0].rank() >= 1)
      << "[concat] needs a part with a last dimension";
  int64_t total = 0;
  for (const Tensor& part : parts) {
    CHECK(part.dtype() == parts[0].dtype() && part.rank() == parts[0].rank() &&
          with_last(part.shape(), 0) == with_last(parts[0].shape(), 0))
        << "[concat] parts differ: " << parts[0] << " and " << part;
    total += part.size(-1);
  }
  Tensor y =
      Tensor::empty(with_last(parts[0].shape(), total), parts[0].dtype());
  int64_t begin = 0;
  for (const Tensor& part : parts) {
    copy_into(part, y.slice(-1, begin, begin + part.size(-1)));
    begin += part.size(-1);
  }
  std::vector<const Tensor*> inputs;
  for (const Tensor& part : parts) inputs.push_back(&part);
  if (auto* n = push<ConcatNode>("concat", inputs, {&y})) {
    for (const Tensor& part : parts) n->sizes.push_back(part.size(-1));
  }
  return y;
}

Tensor expand_heads(const Tensor& x_TR, int64_t heads) {
  CHECK(x_TR.rank() == 2 && heads >= 1)
      << "[expand_heads] " << x_TR << " to " << heads << " heads";
  Tensor y = x_TR.broadcast_dim(1, heads);
  if (auto* n = push<ExpandHeadsNode>("expand_heads", {&x_TR}, {&y})) {
    n->heads = heads;
  }
  return y;
}

}  // namespace tapeline
