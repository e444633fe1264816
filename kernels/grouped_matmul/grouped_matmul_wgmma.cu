#include "kernels/grouped_matmul/grouped_matmul_wgmma.cuh"

namespace tapeline::cuda {
namespace {

using grouped_matmul_wgmma::Config;
using grouped_matmul_wgmma::launch;
using Pass = GroupedMatmulPass;

// Of the tiles tried on an H200, these are within 2 % of the fastest for every
// model's shapes and all three passes: 128x256x64, four stages, two blocks one
// below the other that share B, and groups of eight such tiles.
template <Pass kPass>
void run(const GroupedMatmulPath& path, const GroupedMatmulArguments& x,
         cudaStream_t stream) {
  CHECK(path.wgmma) << "[grouped_matmul] outside the tensor cores' envelope";
  launch<Config<kPass, 256, 4, 2>>(x, 8, stream);
}

}  // namespace

void grouped_matmul_forward_wgmma(Launch l, View<const bf16> x_RD,
                                  View<const bf16> w_EFD,
                                  View<const int32_t> offsets,
                                  View<bf16> y_RF) {
  run<Pass::kForward>(grouped_matmul_forward_path(x_RD, w_EFD, y_RF),
                      {.a = x_RD.data,
                       .b = w_EFD.data,
                       .c = y_RF.data,
                       .a_stride = x_RD.strides[0],
                       .b_stride = w_EFD.strides[1],
                       .c_stride = y_RF.strides[0],
                       .b_expert = w_EFD.strides[0],
                       .c_expert = 0,
                       .offsets = offsets.data,
                       .experts = w_EFD.size(0),
                       .rows = x_RD.size(0),
                       .f = w_EFD.size(1),
                       .d = w_EFD.size(2)},
                      stream_of(l));
}

void grouped_matmul_dgrad_wgmma(Launch l, View<const bf16> dy_RF,
                                View<const bf16> w_EFD,
                                View<const int32_t> offsets, View<bf16> dx_RD) {
  run<Pass::kDgrad>(grouped_matmul_dgrad_path(dy_RF, w_EFD, dx_RD),
                    {.a = dy_RF.data,
                     .b = w_EFD.data,
                     .c = dx_RD.data,
                     .a_stride = dy_RF.strides[0],
                     .b_stride = w_EFD.strides[1],
                     .c_stride = dx_RD.strides[0],
                     .b_expert = w_EFD.strides[0],
                     .c_expert = 0,
                     .offsets = offsets.data,
                     .experts = w_EFD.size(0),
                     .rows = dy_RF.size(0),
                     .f = w_EFD.size(1),
                     .d = w_EFD.size(2)},
                    stream_of(l));
}

void grouped_matmul_wgrad_wgmma(Launch l, View<const bf16> dy_RF,
                                View<const bf16> x_RD,
                                View<const int32_t> offsets,
                                View<float> dw_EFD) {
  run<Pass::kWgrad>(grouped_matmul_wgrad_path(dy_RF, x_RD, dw_EFD),
                    {.a = dy_RF.data,
                     .b = x_RD.data,
                     .c = dw_EFD.data,
                     .a_stride = dy_RF.strides[0],
                     .b_stride = x_RD.strides[0],
                     .c_stride = dw_EFD.strides[1],
                     .b_expert = 0,
                     .c_expert = dw_EFD.strides[0],
                     .offsets = offsets.data,
                     .experts = dw_EFD.size(0),
                     .rows = dy_RF.size(0),
                     .f = dw_EFD.size(1),
                     .d = dw_EFD.size(2)},
                    stream_of(l));
}

}  // namespace tapeline::cuda
