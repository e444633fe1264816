#include "kernels/cross_entropy/cross_entropy.h"

#include <algorithm>
#include <utility>

#include "autograd/observer.h"
#include "autograd/ops.h"
#include "autograd/ops/op.h"
#include "autograd/shape_rules.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/matmul/matmul.h"

namespace tapeline {
namespace {

using internal::broadcast;

// Tokens whose logits are made by one product. On a CPU that bounds what a
// product keeps in cache, and gives the later layers' rows room in it; on a GPU
// one product of all is the fastest, and reads the gradient of w once.
constexpr int64_t kChunkTokens = 1024;

template <class F>
void for_chunks(int64_t tokens, F&& f) {
  const int64_t chunk = launch().on_cuda() ? tokens : kChunkTokens;
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    f(begin, std::min(tokens, begin + chunk));
  }
}

struct CrossEntropyNode : Node {
  // The logits are the node's own: backward_inputs turns them into dlogits in
  // place and backward_weights reads those, so the pair costs one [T, V].
  SavedTensor x_TD, logits_TV, label_T, lse_T, weight_T;
  Tensor dlogits_TV;
  ParameterUse w_VD;
  Shape x_shape;

  void backward_inputs(Backward& b) override {
    dlogits_TV = logits_TV.unpack();
    if (b.retained()) {
      dlogits_TV = dlogits_TV.clone();
    } else {
      logits_TV.reset();
    }
    const Tensor& dloss = b.grad();
    const Tensor weight = weight_T.unpack();
    const Tensor scaled = internal::empty_like(weight);
    Tensor dx_TD =
        b.needs(0) ? Tensor::empty(x_shape, dlogits_TV.dtype()) : Tensor();
    dispatch_float(dlogits_TV.dtype(), [&]<class T>() {
      using A = Accumulator<T>;
      mul(launch(), read<A>(weight).view(),
          broadcast(read<A>(dloss).view(), weight.shape()),
          write<A>(scaled).view());
      cross_entropy_backward<T>(launch(), write<T>(dlogits_TV),
                                read<int32_t>(label_T.unpack()),
                                read<A>(lse_T.unpack()), read<A>(scaled));
      if (!b.needs(0)) return;
      for_chunks(x_shape[0], [&](int64_t begin, int64_t end) {
        matmul<T, T>(launch(), read<T>(dlogits_TV.slice(0, begin, end)),
                     read<T>(w_VD.value()),
                     write<T>(dx_TD.slice(0, begin, end)));
      });
    });
    if (b.needs(0)) b.add(0, std::move(dx_TD));
    if (!w_VD.trainable) dlogits_TV = Tensor();
  }
  bool has_weights() const override { return w_VD.trainable; }
  void backward_weights(Backward& b) override {
    const Tensor dlogits = std::exchange(dlogits_TV, {});
    const Tensor x = x_TD.unpack();
    dispatch_float(x.dtype(), [&]<class T>() {
      for_chunks(x.size(0), [&](int64_t begin, int64_t end) {
        matmul<T, Accumulator<T>>(launch(),
                                  read<T>(dlogits.slice(0, begin, end)),
                                  read<T>(x.slice(0, begin, end)),
                                  write<Accumulator<T>>(b.accumulator(w_VD)),
                                  {.transpose_a = true, .accumulate = true});
      });
    });
  }
};

}  // namespace

CrossEntropy linear_cross_entropy(const Tensor& x_in, const Parameter& w_VD,
                                  const Tensor& label_T,
                                  const Tensor& weight_T) {
  const Tensor& w = w_VD.value();
  const Tensor x_TD = internal::rows_or_copy(x_in);
  const DType acc = accumulator_dtype(x_TD.dtype());
  const Tensor logits_TV = Tensor::empty(
      internal::checked(shape_rules::linear_cross_entropy(
          x_TD.shape(), w.shape(), label_T.shape(), weight_T.shape())),
      x_TD.dtype());
  internal::check_dtypes("linear_cross_entropy", x_TD, w);
  internal::check_accumulates("linear_cross_entropy", x_TD, weight_T);
  const Tensor lse_T = Tensor::empty(label_T.shape(), acc);
  const Tensor weighted = Tensor::empty(label_T.shape(), acc);
  CrossEntropy out{Tensor::empty({1}, acc),
                   Tensor::empty(label_T.shape(), acc)};
  dispatch_float(x_TD.dtype(), [&]<class T>() {
    using A = Accumulator<T>;
    for_chunks(x_TD.size(0), [&](int64_t begin, int64_t end) {
      const Tensor logits = logits_TV.slice(0, begin, end);
      matmul<T, T>(launch(), read<T>(x_TD.slice(0, begin, end)), read<T>(w),
                   write<T>(logits), {.transpose_b = true});
      cross_entropy_forward<T>(launch(), read<T>(logits),
                               read<int32_t>(label_T.slice(0, begin, end)),
                               write<A>(out.token_loss_T.slice(0, begin, end)),
                               write<A>(lse_T.slice(0, begin, end)));
    });
    mul(launch(), read<A>(out.token_loss_T).view(), read<A>(weight_T).view(),
        write<A>(weighted).view());
    sum(launch(), read<A>(weighted).view(), write<A>(out.loss).view());
  });
  if (auto* n = push<CrossEntropyNode>("linear_cross_entropy", {&x_in},
                                       {&out.loss}, {&w_VD})) {
    n->w_VD = ParameterUse(w_VD);
    n->x_shape = x_in.shape();
    if (w_VD.trainable()) n->x_TD.save(x_TD);
    n->logits_TV.save(logits_TV);
    n->label_T.save(label_T);
    n->lse_T.save(lse_T);
    n->weight_T.save(weight_T);
  }
  observe_with("logits", [&] { return logits_TV; });
  observe_with("token_loss", [&] { return out.token_loss_T; });
  return out;
}

}  // namespace tapeline
