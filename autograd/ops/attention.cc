#include "kernels/attention/attention.h"

#include <utility>

#include "autograd/observer.h"
#include "autograd/ops.h"
#include "autograd/ops/op.h"
#include "autograd/shape_rules.h"

namespace tapeline {
namespace {

using internal::empty_like;
using internal::rows_or_copy;

struct AttentionNode : Node {
  SavedTensor q, k, v, o, lse, begin_T, end_T;
  double scale = 1;

  void backward_inputs(Backward& b) override {
    const Tensor q_THD = q.unpack(), k_SGD = k.unpack(), v_SGV = v.unpack();
    const Tensor o_THV = o.unpack();
    const Tensor begin = begin_T.unpack(), end = end_T.unpack();
    Tensor dq = empty_like(q_THD), dk = empty_like(k_SGD),
           dv = empty_like(v_SGV);
    dispatch_float(q_THD.dtype(), [&]<class T>() {
      const auto first = read<int32_t>(begin);
      const auto last = read<int32_t>(end);
      const auto q = read<T>(q_THD), k = read<T>(k_SGD), v = read<T>(v_SGV),
                 o = read<T>(o_THV);
      const Tensor space = internal::workspace(
          attention_backward_workspace_bytes<T>(launch(), q, k, v, o, scale));
      attention_backward<T>(launch(), read<T>(b.grad()), q, k, v, o,
                            read<Accumulator<T>>(lse.unpack()),
                            {first.view(), last.view()}, scale, write<T>(dq),
                            write<T>(dk), write<T>(dv),
                            internal::bytes_of(write<uint8_t>(space).view()));
    });
    b.add(0, std::move(dq));
    b.add(1, std::move(dk));
    b.add(2, std::move(dv));
  }
};

}  // namespace

Tensor attention(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                 const Sequence& sequence, double scale) {
  const Tensor q = rows_or_copy(q_in), k = rows_or_copy(k_in),
               v = rows_or_copy(v_in);
  const Shape shape = internal::checked(shape_rules::attention(
      q.shape(), k.shape(), v.shape(), sequence.tokens()));
  internal::check_dtypes("attention", q, k);
  internal::check_dtypes("attention", q, v);
  Tensor o, lse_TH;
  internal::make_outputs("attention", {&o, &lse_TH}, [&] {
    o = Tensor::empty(shape, q.dtype());
    lse_TH =
        Tensor::empty({q.size(0), q.size(1)}, accumulator_dtype(q.dtype()));
    dispatch_float(q.dtype(), [&]<class T>() {
      const auto first = read<int32_t>(sequence.begin_T);
      const auto last = read<int32_t>(sequence.end_T);
      attention_forward<T>(launch(), read<T>(q), read<T>(k), read<T>(v),
                           {first.view(), last.view()}, scale, write<T>(o),
                           write<Accumulator<T>>(lse_TH));
    });
  });
  if (auto* n = push<AttentionNode>("attention", {&q_in, &k_in, &v_in}, {&o})) {
    n->q.save(q);
    n->k.save(k);
    n->v.save(v);
    n->o.save(o);
    n->lse.save(lse_TH);
    n->begin_T.save(sequence.begin_T);
    n->end_T.save(sequence.end_T);
    n->scale = scale;
  }
  observe_with("attn_lse", [&] { return lse_TH; });
  return o;
}

}  // namespace tapeline
