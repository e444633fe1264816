// Which kernel a grouped matmul runs on CUDA: a pure function of dtype, sizes
// and layout, so that the choice can be printed and tested without a GPU.
//
// Tensor cores (grouped_matmul_wgmma.cuh) take bf16 whose F and D are multiples
// of 8, whose last strides are 1 and whose base and other strides are multiples
// of 16 bytes, which is what the tensor copy engine can address. All else goes
// to the plain kernel.
#pragma once

#include <cstdint>
#include <ostream>

#include "kernels/kernel.h"

namespace tapeline {

enum class GroupedMatmulPass { kForward, kDgrad, kWgrad };

struct GroupedMatmulPath {
  bool wgmma = false;

  friend bool operator==(const GroupedMatmulPath&,
                         const GroupedMatmulPath&) = default;
  friend std::ostream& operator<<(std::ostream& out,
                                  const GroupedMatmulPath& p) {
    return out << (p.wgmma ? "wgmma" : "plain");
  }
};

// `aligned`: as tma_aligned() says of every operand.
inline GroupedMatmulPath grouped_matmul_path(GroupedMatmulPass pass,
                                             DType dtype, int64_t experts,
                                             int64_t rows, int64_t f, int64_t d,
                                             bool aligned) {
  // Coordinates and tile numbers are int32.
  constexpr int64_t kMost = int64_t{1} << 30;
  if (dtype != DType::kBf16 || !aligned || f % 8 != 0 || d % 8 != 0) return {};
  if (experts <= 0 || rows <= 0 || f <= 0 || d <= 0) return {};
  if (rows >= kMost || f >= kMost || d >= kMost) return {};
  const int64_t n = pass == GroupedMatmulPass::kForward ? f : d;
  const int64_t m = pass == GroupedMatmulPass::kWgrad ? f * experts : rows;
  if ((m / 128 + experts) * (n / 128 + 1) >= kMost) return {};
  return {.wgmma = true};
}

// Whether the tensor copy engine can address the view.
template <class T>
bool tma_aligned(const View<T>& x) {
  constexpr int64_t kUnit = 16 / sizeof(T);
  if (reinterpret_cast<uintptr_t>(x.data) % 16 != 0) return false;
  if (x.strides[-1] != 1) return false;
  for (int i = 0; i + 1 < x.rank(); ++i) {
    if (x.strides[i] % kUnit != 0 || x.strides[i] <= 0) return false;
  }
  return true;
}

// Of the arguments of each function of grouped_matmul.h.
template <class T>
GroupedMatmulPath grouped_matmul_forward_path(const View<const T>& x_RD,
                                              const View<const T>& w_EFD,
                                              const View<T>& y_RF) {
  return grouped_matmul_path(
      GroupedMatmulPass::kForward, dtype_of<T>(), w_EFD.size(0), x_RD.size(0),
      w_EFD.size(1), w_EFD.size(2),
      tma_aligned(x_RD) && tma_aligned(w_EFD) && tma_aligned(y_RF));
}
template <class T>
GroupedMatmulPath grouped_matmul_dgrad_path(const View<const T>& dy_RF,
                                            const View<const T>& w_EFD,
                                            const View<T>& dx_RD) {
  return grouped_matmul_path(
      GroupedMatmulPass::kDgrad, dtype_of<T>(), w_EFD.size(0), dy_RF.size(0),
      w_EFD.size(1), w_EFD.size(2),
      tma_aligned(dy_RF) && tma_aligned(w_EFD) && tma_aligned(dx_RD));
}
template <class T, class G>
GroupedMatmulPath grouped_matmul_wgrad_path(const View<const T>& dy_RF,
                                            const View<const T>& x_RD,
                                            const View<G>& dw_EFD) {
  return grouped_matmul_path(
      GroupedMatmulPass::kWgrad, dtype_of<T>(), dw_EFD.size(0), dy_RF.size(0),
      dw_EFD.size(1), dw_EFD.size(2),
      tma_aligned(dy_RF) && tma_aligned(x_RD) && tma_aligned(dw_EFD));
}

namespace cuda {

// The contracts of grouped_matmul.h, where the path above says wgmma (CHECK).
void grouped_matmul_forward_wgmma(Launch l, View<const bf16> x_RD,
                                  View<const bf16> w_EFD,
                                  View<const int32_t> offsets, View<bf16> y_RF);
void grouped_matmul_dgrad_wgmma(Launch l, View<const bf16> dy_RF,
                                View<const bf16> w_EFD,
                                View<const int32_t> offsets, View<bf16> dx_RD);
void grouped_matmul_wgrad_wgmma(Launch l, View<const bf16> dy_RF,
                                View<const bf16> x_RD,
                                View<const int32_t> offsets,
                                View<float> dw_EFD);

}  // namespace cuda
}  // namespace tapeline
