#include "kernels/rope/rope.h"

#include <utility>
#include <vector>

#include "autograd/ops.h"
#include "autograd/ops/op.h"
#include "autograd/shape_rules.h"

namespace tapeline {
namespace {

struct RopeNode : Node {
  SavedTensor cos_TR, sin_TR;
  bool interleaved = false;

  void backward_inputs(Backward& b) override {
    const Tensor& dy = b.grad();
    Tensor dx = internal::empty_like(dy);
    dispatch_float(dy.dtype(), [&]<class T>() {
      rope_backward<T>(launch(), read<T>(dy), read<float>(cos_TR.unpack()),
                       read<float>(sin_TR.unpack()), interleaved, write<T>(dx));
    });
    b.add(0, std::move(dx));
  }
};

RopeOptions kernel_options(const RopeConfig& config) {
  RopeOptions options;
  options.theta = config.theta;
  options.dim = static_cast<int>(config.dim);
  switch (config.scaling) {
    case RopeConfig::Scaling::kDefault:
      options.scaling = RopeOptions::kDefault;
      break;
    case RopeConfig::Scaling::kYarn:
      options.scaling = RopeOptions::kYarn;
      break;
    case RopeConfig::Scaling::kLlama3:
      options.scaling = RopeOptions::kLlama3;
      break;
  }
  options.factor = config.factor;
  options.beta_fast = config.beta_fast;
  options.beta_slow = config.beta_slow;
  options.low_freq_factor = config.low_freq_factor;
  options.high_freq_factor = config.high_freq_factor;
  options.original_max_position = config.original_max_position;
  options.truncate = config.truncate;
  return options;
}

}  // namespace

RopeTable rope_table(const RopeConfig& config, const Tensor& position_T) {
  const std::vector<double> inverse =
      rope_inverse_frequencies(kernel_options(config));
  const Shape shape = {position_T.size(0), config.dim / 2};
  RopeTable table{Tensor::empty(shape, DType::kF32),
                  Tensor::empty(shape, DType::kF32), config.interleaved};
  rope_table(launch(), read<int32_t>(position_T), inverse,
             config.attention_factor, write<float>(table.cos_TR),
             write<float>(table.sin_TR));
  return table;
}

Tensor rope(const Tensor& x_in, const RopeTable& table) {
  internal::checked(shape_rules::rope(x_in.shape(), table.cos_TR.shape()));
  const Tensor x = internal::rows_or_copy(x_in);
  Tensor y = internal::empty_like(x);
  dispatch_float(x.dtype(), [&]<class T>() {
    rope_forward<T>(launch(), read<T>(x), read<float>(table.cos_TR),
                    read<float>(table.sin_TR), table.interleaved, write<T>(y));
  });
  if (auto* n = push<RopeNode>("rope", {&x_in}, {&y})) {
    n->cos_TR.save(table.cos_TR);
    n->sin_TR.save(table.sin_TR);
    n->interleaved = table.interleaved;
  }
  return y;
}

}  // namespace tapeline
