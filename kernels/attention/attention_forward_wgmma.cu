#include "kernels/attention/attention_forward_wgmma.cuh"
#include "kernels/attention/attention_wgmma.h"

namespace tapeline::cuda {
namespace {

template <class T>
bool aligned(const View<T>& x) {
  bool all = reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
             (x.strides[-1] == 1 || x.size(-1) <= 1);
  for (int i = 0; i + 1 < x.rank(); ++i) {
    all =
        all && (x.size(i) <= 1 || (x.strides[i] % 8 == 0 && x.strides[i] > 0));
  }
  return all;
}

}  // namespace

AttentionPath attention_path(const View<const bf16>& q_THD,
                             const View<const bf16>& k_SGD,
                             const View<const bf16>& v_SGV,
                             const View<const bf16>& o_THV, double scale) {
  return attention_path(
      {true, q_THD.size(0), k_SGD.size(0), q_THD.size(1), k_SGD.size(1),
       q_THD.size(2), v_SGV.size(2), scale,
       aligned(q_THD) && aligned(k_SGD) && aligned(v_SGV) && aligned(o_THV)});
}

void attention_forward_wgmma(Launch l, View<const bf16> q_THD,
                             View<const bf16> k_SGD, View<const bf16> v_SGV,
                             KeyRange range, double scale, View<bf16> o_THV,
                             View<float> lse_TH) {
  using attention_detail::ForwardConfig;
  using attention_detail::launch_forward;
  const auto run = [&]<class C>(C) {
    launch_forward<C>(l, q_THD, k_SGD, v_SGV, range, scale, o_THV, lse_TH);
  };
  switch (q_THD.size(2)) {
    case 128:
      return run(ForwardConfig<128, 128, 128, 2, true>{});
    case 192:
      return run(ForwardConfig<192, 128, 128, 2, true>{});
    case 256:
      return run(ForwardConfig<256, 256, 64, 2, true>{});
  }
  CHECK(false) << "[attention_forward] outside the tensor cores' envelope";
}

}  // namespace tapeline::cuda
