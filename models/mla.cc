#include "models/mla.h"

namespace tapeline {

Tensor selected_attention(const Tensor& q_THD, const Tensor& k_SHD,
                          const Tensor& v_SHV, const DsaSelection& selection,
                          double scale) {
  const int64_t t = q_THD.size(0), s = k_SHD.size(0), h = q_THD.size(1);
  const int64_t d = q_THD.size(2), v = v_SHV.size(2);
  // One head at a time with key row [v | k]: sparse attention takes its values
  // from the first columns, and a query that is zero there ignores them.
  const Tensor zeros = Tensor::zeros({t, 1, v}, q_THD.dtype());
  const std::vector<int64_t> query_sizes(static_cast<size_t>(h), d);
  const std::vector<int64_t> value_sizes(static_cast<size_t>(h), v);
  const auto q = split(reshape(q_THD, {t, h * d}), query_sizes);
  const auto k = split(reshape(k_SHD, {s, h * d}), query_sizes);
  const auto values = split(reshape(v_SHV, {s, h * v}), value_sizes);
  std::vector<Tensor> heads;
  for (size_t i = 0; i < q.size(); ++i) {
    const Tensor query = concat({zeros, reshape(q[i], {t, 1, d})});
    const SparseAttention a =
        sparse_attention(query, concat({values[i], k[i]}), selection, scale, v);
    heads.push_back(reshape(a.o_THV, {t, v}));
  }
  return reshape(concat(heads), {t, h, v});
}

}  // namespace tapeline
