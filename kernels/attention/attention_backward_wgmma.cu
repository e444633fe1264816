#include "kernels/attention/attention_backward_wgmma.cuh"
#include "kernels/attention/attention_wgmma.h"

namespace tapeline::cuda {

void attention_backward_wgmma(Launch l, View<const bf16> do_THV,
                              View<const bf16> q_THD, View<const bf16> k_SGD,
                              View<const bf16> v_SGV, View<const bf16> o_THV,
                              View<const float> lse_TH, KeyRange range,
                              double scale, View<bf16> dq_THD,
                              View<bf16> dk_SGD, View<bf16> dv_SGV,
                              std::byte* workspace) {
  using namespace attention_detail;
  const AttentionBackwardPlan plan =
      attention_backward_plan(q_THD.size(0), q_THD.size(1));
  const BackwardArguments x{do_THV, q_THD,  k_SGD,  v_SGV,
                            o_THV,  lse_TH, range,  static_cast<float>(scale),
                            dq_THD, dk_SGD, dv_SGV, prepared(plan, workspace)};
  switch (q_THD.size(2)) {
    case 128:
      launch_prepare<128>(l, x);
      launch_queries<QueryConfig<128, 128, 96, 3, 2, Products::kAfter>>(l, x);
      return launch_keys<KeyConfig<128, 128, 2, 64, 4, true>>(l, x);
    case 192:
      launch_prepare<128>(l, x);
      launch_queries<QueryConfig<192, 128, 64, 3, 2, Products::kAfter>>(l, x);
      return launch_keys<KeyConfig<192, 128, 1, 64, 4, true>>(l, x);
    case 256:
      launch_prepare<256>(l, x);
      launch_queries<QueryConfig<256, 256, 64, 2, 1, Products::kAlone>>(l, x);
      return launch_keys<KeyConfig<256, 256, 1, 64, 2, false>>(l, x);
  }
  CHECK(false) << "[attention_backward] outside the tensor cores' envelope";
}

}  // namespace tapeline::cuda
