#include <cublasLt.h>

#include <array>
#include <map>
#include <mutex>

#include "kernels/cuda.cuh"
#include "kernels/matmul/matmul_cuda.h"

namespace tapeline::cuda {
namespace {

void check(cublasStatus_t status, const char* what) {
  CHECK(status == CUBLAS_STATUS_SUCCESS)
      << "[matmul] " << what << ": " << cublasLtGetStatusString(status);
}

// What NVIDIA advises for Hopper.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;

// Everything that an algorithm may depend on, so that a problem always runs by
// the same one: element types, sizes, strides, alignments, options.
using Key = std::array<int64_t, 18>;

// A column-major matrix of cuBLAS is the transpose of a row-major one:
// c^T = op(b)^T op(a)^T, so b comes first and nothing else changes.
struct Plan {
  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t b, a, c;
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace_bytes;
  bool possible;
};

// Handle, plans and workspaces of the process. They live until its end, so a
// plan may be used without the lock.
struct Library {
  cublasLtHandle_t handle;
  std::mutex mutex;
  std::map<Key, Plan> plans;
  std::map<cudaStream_t, void*> workspaces, products;

  Library() { check(cublasLtCreate(&handle), "cublasLtCreate"); }
  static Library& get() {
    static Library* library = new Library;
    return *library;
  }
  template <class Make>
  Plan& plan(const Key& key, Make make) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto found = plans.find(key);
    if (found == plans.end()) found = plans.emplace(key, make()).first;
    return found->second;
  }
  void* workspace(cudaStream_t stream) {
    return made_once(workspaces, stream, kWorkspaceBytes);
  }
  void* made_once(std::map<cudaStream_t, void*>& of, cudaStream_t stream,
                  size_t size) {
    const std::lock_guard<std::mutex> lock(mutex);
    void*& bytes = of[stream];
    if (bytes == nullptr) {
      const cudaError_t error = cudaMalloc(&bytes, size);
      CHECK(error == cudaSuccess)
          << "[matmul] workspace: " << cudaGetErrorString(error);
    }
    return bytes;
  }
};

template <class T>
constexpr cudaDataType_t kType =
    std::is_same_v<T, bf16> ? CUDA_R_16BF : CUDA_R_32F;

template <class T>
int64_t leading(const View<T>& x) {
  return std::max({x.strides[1], x.size(2), int64_t{1}});
}
template <class T>
int64_t batch_step(const View<T>& x) {
  return x.size(0) > 1 ? x.strides[0] : 0;
}
// Up to the 16 bytes that the widest load needs. A batch must keep it.
template <class T>
int64_t alignment(const View<T>& x) {
  int64_t bits = reinterpret_cast<intptr_t>(x.data) |
                 batch_step(x) * int64_t{sizeof(T)} | 16;
  return bits & -bits;
}

template <class T>
cublasLtMatrixLayoutOpaque_t layout(const View<T>& x) {
  cublasLtMatrixLayoutOpaque_t out;
  check(cublasLtMatrixLayoutInit(&out, kType<std::remove_const_t<T>>, x.size(2),
                                 x.size(1), leading(x)),
        "layout");
  const auto batch = static_cast<int32_t>(x.size(0));
  const int64_t step = batch_step(x);
  check(cublasLtMatrixLayoutSetAttribute(
            &out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof(batch)),
        "batch");
  check(cublasLtMatrixLayoutSetAttribute(
            &out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step,
            sizeof(step)),
        "batch step");
  return out;
}

template <class T, class C>
Key key_of(const View<const T>& a, const View<const T>& b, const View<C>& c,
           const MatmulOptions& options) {
  return {kType<T>,
          kType<C>,
          options.transpose_a,
          options.transpose_b,
          options.accumulate,
          c.size(0),
          c.size(1),
          c.size(2),
          a.size(options.transpose_a ? 1 : 2),
          leading(a),
          leading(b),
          leading(c),
          batch_step(a),
          batch_step(b),
          batch_step(c),
          alignment(a),
          alignment(b),
          alignment(c)};
}

template <class T, class C>
Plan make_plan(cublasLtHandle_t handle, const View<const T>& a,
               const View<const T>& b, const View<C>& c,
               const MatmulOptions& options) {
  Plan plan{};
  // Not the type that allows TF32.
  check(cublasLtMatmulDescInit(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "product");
  const cublasOperation_t op_a =
      options.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t op_b =
      options.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  check(cublasLtMatmulDescSetAttribute(
            &plan.product, CUBLASLT_MATMUL_DESC_TRANSA, &op_b, sizeof(op_b)),
        "transpose");
  check(cublasLtMatmulDescSetAttribute(
            &plan.product, CUBLASLT_MATMUL_DESC_TRANSB, &op_a, sizeof(op_a)),
        "transpose");
  plan.a = layout(a);
  plan.b = layout(b);
  plan.c = layout(c);

  cublasLtMatmulPreferenceOpaque_t preference;
  check(cublasLtMatmulPreferenceInit(&preference), "preference");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute,
                          const auto& value) {
    check(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value,
                                               sizeof(value)),
          "preference");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
  // Parts of a split K meet in f32 in the workspace: c is rounded once.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
         static_cast<uint32_t>(alignment(b)));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
         static_cast<uint32_t>(alignment(a)));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
         static_cast<uint32_t>(alignment(c)));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
         static_cast<uint32_t>(alignment(c)));

  cublasLtMatmulHeuristicResult_t best;
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle, &plan.product, &plan.b, &plan.a, &plan.c, &plan.c, &preference, 1,
      &best, &found);
  plan.possible = status == CUBLAS_STATUS_SUCCESS && found > 0 &&
                  best.state == CUBLAS_STATUS_SUCCESS;
  if (!plan.possible) return plan;
  plan.algorithm = best.algo;
  plan.workspace_bytes = best.workspaceSize;
  return plan;
}

}  // namespace

template <class T, class C>
bool matmul_lt(Launch l, View<const T> a, View<const T> b, View<C> c,
               MatmulOptions options) {
  Library& library = Library::get();
  const cudaStream_t stream = stream_of(l);
  Plan& plan = library.plan(key_of(a, b, c, options), [&] {
    return make_plan(library.handle, a, b, c, options);
  });
  if (!plan.possible) return false;
  const auto alpha = static_cast<float>(options.alpha);
  const float beta = options.accumulate ? 1 : 0;
  check(cublasLtMatmul(library.handle, &plan.product, &alpha, b.data, &plan.b,
                       a.data, &plan.a, &beta, c.data, &plan.c, c.data, &plan.c,
                       &plan.algorithm, library.workspace(stream),
                       plan.workspace_bytes, stream),
        "cublasLtMatmul");
  return true;
}

float* matmul_products(Launch l) {
  Library& library = Library::get();
  return static_cast<float*>(library.made_once(library.products, stream_of(l),
                                               sizeof(float) * kProducts));
}

#define TAPELINE_MATMUL_LT(T, C)                                         \
  template bool matmul_lt(Launch, View<const T>, View<const T>, View<C>, \
                          MatmulOptions);
TAPELINE_MATMUL_LT(float, float)
TAPELINE_MATMUL_LT(bf16, bf16)
TAPELINE_MATMUL_LT(bf16, float)
#undef TAPELINE_MATMUL_LT

}  // namespace tapeline::cuda
