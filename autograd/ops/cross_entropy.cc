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
  // The gradient of the logits for dloss = 1, in the bytes that were theirs.
  // backward_inputs takes it over, multiplies it and leaves it to
  // backward_weights: the pair costs one [T, V].
  SavedTensor x_TD, dlogits_TV;
  Tensor scaled_TV;
  ParameterUse w_VD;
  Shape x_shape;

  void backward_inputs(Backward& b) override {
    scaled_TV = dlogits_TV.unpack();
    if (b.retained()) {
      scaled_TV = scaled_TV.clone();
    } else {
      dlogits_TV.reset();
    }
    Tensor dx_TD =
        b.needs(0) ? Tensor::empty(x_shape, scaled_TV.dtype()) : Tensor();
    dispatch_float(scaled_TV.dtype(), [&]<class T>() {
      cross_entropy_scale<T>(launch(), write<T>(scaled_TV),
                             read<Accumulator<T>>(b.grad()));
      if (!b.needs(0)) return;
      for_chunks(x_shape[0], [&](int64_t begin, int64_t end) {
        matmul<T, T>(launch(), read<T>(scaled_TV.slice(0, begin, end)),
                     read<T>(w_VD.value()),
                     write<T>(dx_TD.slice(0, begin, end)));
      });
    });
    if (b.needs(0)) b.add(0, std::move(dx_TD));
    if (!w_VD.trainable) scaled_TV = Tensor();
  }
  bool has_weights() const override { return w_VD.trainable; }
  void backward_weights(Backward& b) override {
    const Tensor dlogits = std::exchange(scaled_TV, {});
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
  // A row's gradient is made beside its loss, which moves the logits once. An
  // observer sees them as they were: then it is made afterwards, the same bits.
  const bool records = internal::will_record({&x_in}, {&w_VD});
  const bool observed = observer() != nullptr;
  dispatch_float(x_TD.dtype(), [&]<class T>() {
    using A = Accumulator<T>;
    const auto weight = read<A>(weight_T);
    for_chunks(x_TD.size(0), [&](int64_t begin, int64_t end) {
      const Tensor logits = logits_TV.slice(0, begin, end);
      matmul<T, T>(launch(), read<T>(x_TD.slice(0, begin, end)), read<T>(w),
                   write<T>(logits), {.transpose_b = true});
      const auto label = read<int32_t>(label_T.slice(0, begin, end));
      const auto loss = write<A>(out.token_loss_T.slice(0, begin, end));
      const auto lse = write<A>(lse_T.slice(0, begin, end));
      if (records && !observed) {
        cross_entropy_forward_backward<T>(
            launch(), write<T>(logits), label,
            read<A>(weight_T.slice(0, begin, end)), loss, lse);
      } else {
        cross_entropy_forward<T>(launch(), read<T>(logits), label, loss, lse);
      }
    });
    mul(launch(), read<A>(out.token_loss_T).view(), weight.view(),
        write<A>(weighted).view());
    sum(launch(), read<A>(weighted).view(), write<A>(out.loss).view());
    observe_with("logits", [&] { return logits_TV; });
    if (records && observed) {
      cross_entropy_backward<T>(launch(), write<T>(logits_TV),
                                read<int32_t>(label_T), read<A>(lse_T), weight);
    }
  });
  auto* n = push<CrossEntropyNode>("linear_cross_entropy", {&x_in}, {&out.loss},
                                   {&w_VD});
  CHECK_EQ(n != nullptr, records) << "[linear_cross_entropy] records otherwise";
  if (n != nullptr) {
    n->w_VD = ParameterUse(w_VD);
    n->x_shape = x_in.shape();
    if (w_VD.trainable()) n->x_TD.save(x_TD);
    n->dlogits_TV.save(logits_TV);
  }
  observe_with("token_loss", [&] { return out.token_loss_T; });
  return out;
}

}  // namespace tapeline
