#include "autograd/adamw.h"

#include "kernels/adamw/adamw.h"
#include "runtime/access.h"

namespace tapeline {

void adamw_update(const AdamWRule& rule, const UpdateStep& step,
                  const Tensor& param, const Tensor& grad, const Tensor& m,
                  const Tensor& v) {
  const AdamWOptions options = {
      .lr = step.lr,
      .beta1 = rule.beta1,
      .beta2 = rule.beta2,
      .eps = rule.eps,
      .weight_decay = step.decays ? rule.weight_decay : 0,
      .step = step.count,
      .gradient_scale = step.gradient_scale,
      .clip_1 = step.clip_1,
  };
  const auto run = [&]<class A>(A) {
    adamw<A>(launch(), write<A>(param), read<A>(grad), write<A>(m), write<A>(v),
             options);
  };
  param.dtype() == DType::kF64 ? run(double{}) : run(float{});
}

}  // namespace tapeline
