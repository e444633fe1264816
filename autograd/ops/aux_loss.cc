#include "kernels/aux_loss/aux_loss.h"

#include <utility>

#include "autograd/ops.h"
#include "autograd/ops/op.h"
#include "autograd/shape_rules.h"
#include "kernels/elementwise/elementwise.h"

namespace tapeline {
namespace {

using internal::broadcast;
using internal::empty_like;
using internal::rows_or_copy;

template <class F>
void dispatch_acc(const Tensor& logits, F&& f) {
  CHECK(logits.dtype() != DType::kBf16)
      << "[aux loss] logits are fp32, got " << logits;
  if (logits.dtype() == DType::kF64) {
    f.template operator()<double>();
  } else {
    f.template operator()<float>();
  }
}

template <class T>
View<const T> optional_view(const Tensor& tensor) {
  // The lease ends at once: the bytes are the model's or the batch's and stay.
  return tensor ? read<T>(tensor).view() : View<const T>();
}

TokenSet token_set(const Tensor& valid_T) {
  return {optional_view<uint8_t>(valid_T), {}};
}

BalanceKind kernel_kind(const BalanceRule& rule) {
  switch (rule.kind) {
    case BalanceRule::Kind::kSigmoidBiased:
      return BalanceKind::kBiasedSigmoid;
    case BalanceRule::Kind::kSoftmax:
      return BalanceKind::kSoftmax;
    case BalanceRule::Kind::kSigmoid:
      break;
  }
  return BalanceKind::kSigmoid;
}

Tensor partials() {
  return Tensor::empty({kLossPartials}, DType::kF64, Tag::kWorkspace);
}

// dlogits for a loss gradient of 1, times the one that came.
template <class A>
void multiply_by(const Tensor& dloss, const Tensor& dlogits) {
  mul(launch(), read<A>(dlogits).view(),
      broadcast(read<A>(dloss).view(), dlogits.shape()),
      write<A>(dlogits).view());
}

struct BalanceNode : Node {
  SavedTensor logits_TE, bias_E, counts_E, valid_T;
  BalanceKind kind = BalanceKind::kSigmoid;

  void backward_inputs(Backward& b) override {
    const Tensor logits = logits_TE.unpack();
    Tensor dlogits = empty_like(logits);
    dispatch_acc(logits, [&]<class A>() {
      balance_loss_backward<A>(launch(), 1.0, kind, read<A>(logits),
                               optional_view<A>(bias_E.unpack()),
                               read<int32_t>(counts_E.unpack()),
                               token_set(valid_T.unpack()), write<A>(dlogits));
      multiply_by<A>(b.grad(), dlogits);
    });
    b.add(0, std::move(dlogits));
  }
};

struct ZLossNode : Node {
  SavedTensor logits_TE, valid_T;

  void backward_inputs(Backward& b) override {
    const Tensor logits = logits_TE.unpack();
    Tensor dlogits = empty_like(logits);
    dispatch_acc(logits, [&]<class A>() {
      z_loss_backward<A>(launch(), 1.0, read<A>(logits),
                         token_set(valid_T.unpack()), write<A>(dlogits));
      multiply_by<A>(b.grad(), dlogits);
    });
    b.add(0, std::move(dlogits));
  }
};

}  // namespace

Tensor balance_loss(const Tensor& logits_in, const Tensor& bias_in,
                    const Tensor& expert_TK, const Tensor& valid_T,
                    const BalanceRule& rule) {
  const Tensor logits_TE = rows_or_copy(logits_in);
  CHECK(logits_TE.rank() == 2 && expert_TK.rank() == 2 &&
        logits_TE.size(0) == expert_TK.size(0))
      << "[balance_loss] logits are " << logits_TE << ", experts are "
      << expert_TK;
  const Tensor counts_E = Tensor::empty({logits_TE.size(1)}, DType::kI32);
  count_experts<int32_t>(launch(), read<int32_t>(expert_TK), token_set(valid_T),
                         write<int32_t>(counts_E));
  const Tensor bias_E = bias_in && bias_in.dtype() != logits_TE.dtype()
                            ? cast(bias_in.detach(), logits_TE.dtype())
                            : bias_in;
  Tensor loss = Tensor::empty({1}, logits_TE.dtype());
  dispatch_acc(logits_TE, [&]<class A>() {
    balance_loss_forward<A>(launch(), kernel_kind(rule), read<A>(logits_TE),
                            optional_view<A>(bias_E), read<int32_t>(counts_E),
                            token_set(valid_T), write<A>(loss),
                            write<double>(partials()));
  });
  if (auto* n = push<BalanceNode>("balance_loss", {&logits_in}, {&loss})) {
    n->logits_TE.save(logits_TE);
    n->bias_E.save(bias_E);
    n->counts_E.save(counts_E);
    n->valid_T.save(valid_T);
    n->kind = kernel_kind(rule);
  }
  return loss;
}

Tensor z_loss(const Tensor& logits_in, const Tensor& valid_T) {
  const Tensor logits_TE = rows_or_copy(logits_in);
  CHECK_EQ(logits_TE.rank(), 2) << "[z_loss] logits are " << logits_TE;
  Tensor loss = Tensor::empty({1}, logits_TE.dtype());
  dispatch_acc(logits_TE, [&]<class A>() {
    z_loss_forward<A>(launch(), read<A>(logits_TE), token_set(valid_T),
                      write<A>(loss), write<double>(partials()));
  });
  if (auto* n = push<ZLossNode>("z_loss", {&logits_in}, {&loss})) {
    n->logits_TE.save(logits_TE);
    n->valid_T.save(valid_T);
  }
  return loss;
}

Tensor count_experts(const Tensor& expert_TK, const Tensor& valid_T,
                     int64_t experts) {
  const Tensor counts_E = Tensor::empty({experts}, DType::kI64);
  count_experts<int64_t>(launch(), read<int32_t>(expert_TK), token_set(valid_T),
                         write<int64_t>(counts_E));
  return counts_E;
}

}  // namespace tapeline
