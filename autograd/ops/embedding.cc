#include "kernels/embedding/embedding.h"

#include "autograd/ops.h"
#include "autograd/ops/op.h"
#include "autograd/shape_rules.h"

namespace tapeline {
namespace {

struct EmbeddingNode : Node {
  SavedTensor ids_T;
  ParameterUse table;
  int64_t padding_id = -1;

  void backward_inputs(Backward&) override {}
  bool has_weights() const override { return true; }
  void backward_weights(Backward& b) override {
    dispatch_float(b.grad().dtype(), [&]<class T>() {
      const Tensor& sum = b.accumulator(table);
      const Tensor space =
          internal::workspace(embedding_backward_workspace_bytes(
              launch(), b.grad().size(0), sum.size(0)));
      embedding_backward<T>(launch(), read<int32_t>(ids_T.unpack()),
                            read<T>(b.grad()), write<Accumulator<T>>(sum),
                            padding_id,
                            internal::bytes_of(write<uint8_t>(space).view()));
    });
  }
};

}  // namespace

Tensor embedding(const Tensor& ids_T, const Parameter& table_VD,
                 int64_t padding_id) {
  const Tensor& table = table_VD.value();
  Tensor y_TD = Tensor::empty(
      internal::checked(shape_rules::embedding(ids_T.shape(), table.shape())),
      table.dtype());
  dispatch_float(table.dtype(), [&]<class T>() {
    embedding_forward<T>(launch(), read<int32_t>(ids_T), read<T>(table),
                         write<T>(y_TD));
  });
  if (auto* n = push<EmbeddingNode>("embedding", {}, {&y_TD}, {&table_VD})) {
    n->table = ParameterUse(table_VD);
    n->ids_T.save(ids_T);
    n->padding_id = padding_id;
  }
  return y_TD;
}

}  // namespace tapeline
