#include "kernels/grouped_matmul/grouped_matmul_fast.h"

#include <sstream>

#include "gtest/gtest.h"

namespace tapeline {
namespace {

using Pass = GroupedMatmulPass;

GroupedMatmulPath path(int64_t f, int64_t d, DType dtype = DType::kBf16,
                       bool aligned = true) {
  return grouped_matmul_path(Pass::kForward, dtype, 8, 4096, f, d, aligned);
}

TEST(GroupedMatmulPath, TensorCoresTakeBf16InUnitsOf16Bytes) {
  EXPECT_TRUE(path(512, 256).wgmma);
  EXPECT_TRUE(path(8, 72).wgmma);
  EXPECT_FALSE(path(512, 256, DType::kF32).wgmma);
  EXPECT_FALSE(path(512, 256, DType::kF64).wgmma);
  EXPECT_FALSE(path(512, 257).wgmma);
  EXPECT_FALSE(path(12, 256).wgmma);
  EXPECT_FALSE(path(512, 256, DType::kBf16, false).wgmma);
}

TEST(GroupedMatmulPath, NothingToDoIsPlain) {
  for (Pass pass : {Pass::kForward, Pass::kDgrad, Pass::kWgrad}) {
    for (int64_t empty : {0, 1, 2, 3}) {
      int64_t sizes[] = {8, 4096, 512, 256};
      sizes[empty] = 0;
      EXPECT_FALSE(grouped_matmul_path(pass, DType::kBf16, sizes[0], sizes[1],
                                       sizes[2], sizes[3], true)
                       .wgmma);
    }
  }
}

TEST(GroupedMatmulPath, CoordinatesFitInt32) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const auto wgmma = [](Pass pass, int64_t experts, int64_t rows, int64_t f,
                        int64_t d) {
    return grouped_matmul_path(pass, DType::kBf16, experts, rows, f, d, true)
        .wgmma;
  };
  for (Pass pass : {Pass::kForward, Pass::kDgrad, Pass::kWgrad}) {
    EXPECT_TRUE(wgmma(pass, 8, kMost - 8, 64, 64));
    EXPECT_FALSE(wgmma(pass, 8, kMost, 64, 64));
    EXPECT_FALSE(wgmma(pass, 1, 128, kMost, 8));
    EXPECT_FALSE(wgmma(pass, 1, 128, 8, kMost));
  }
  // Numbers of tiles: of y, of dx, and of all dw.
  EXPECT_FALSE(wgmma(Pass::kForward, 8, kMost / 4, 65536, 8));
  EXPECT_TRUE(wgmma(Pass::kDgrad, 8, kMost / 4, 65536, 8));
  EXPECT_FALSE(wgmma(Pass::kDgrad, 8, kMost / 4, 8, 65536));
  EXPECT_FALSE(wgmma(Pass::kWgrad, 65536, 128, 8192, 65536));
  EXPECT_TRUE(wgmma(Pass::kWgrad, 256, 128, 8192, 65536));
}

TEST(GroupedMatmulPath, StridesDecideAlignment) {
  alignas(16) bf16 data[64];
  EXPECT_TRUE(tma_aligned(View<bf16>(data, Shape{4, 8})));
  EXPECT_TRUE(tma_aligned(View<bf16>(data, Shape{2, 8}, Shape{24, 1})));
  EXPECT_FALSE(tma_aligned(View<bf16>(data, Shape{2, 8}, Shape{12, 1})));
  EXPECT_FALSE(tma_aligned(View<bf16>(data, Shape{2, 8}, Shape{1, 2})));
  EXPECT_FALSE(tma_aligned(View<bf16>(data + 1, Shape{4, 8})));
  alignas(16) float sums[64];
  EXPECT_TRUE(tma_aligned(View<float>(sums, Shape{4, 4, 4})));
  EXPECT_FALSE(tma_aligned(View<float>(sums, Shape{2, 2, 2})));
}

TEST(GroupedMatmulPath, ModelsRunOnTensorCores) {
  struct Row {
    int64_t experts, rows, f, d;
  };
  for (const Row& r : std::initializer_list<Row>{
           {32, 65536, 4096, 6144},
           {32, 65536, 6144, 2048},
           {32, 65536, 4096, 7168},
           {32, 65536, 7168, 2048},
           {16, 65536, 3072, 4096},
           {16, 65536, 4096, 1536},
           {128, 131072, 1536, 2048},
           {128, 131072, 2048, 768},
       }) {
    SCOPED_TRACE(testing::Message()
                 << r.experts << " experts " << r.f << " x " << r.d);
    for (Pass pass : {Pass::kForward, Pass::kDgrad, Pass::kWgrad}) {
      EXPECT_TRUE(grouped_matmul_path(pass, DType::kBf16, r.experts, r.rows,
                                      r.f, r.d, true)
                      .wgmma);
    }
  }
}

TEST(GroupedMatmulPath, Prints) {
  std::ostringstream out;
  out << path(512, 256) << "; " << path(511, 256);
  EXPECT_EQ(out.str(), "wgmma; plain");
}

}  // namespace
}  // namespace tapeline
