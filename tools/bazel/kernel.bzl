"""kernel(): the targets of one folder below kernels/."""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")
load("//tools/bazel:cuda.bzl", "CUDA_ONLY", "cuda_library", "if_cuda")

# Loops marked `#pragma omp simd` become vector code, and the lanes of a
# reduction (kernels/simd_math.h) stay in registers.
KERNEL_COPTS = ["-O3", "-fopenmp-simd"]

# The ops below kernels/, each with tests and a benchmark that run on both sides.
OPS = [
    "adamw",
    "attention",
    "aux_loss",
    "combine",
    "cross_entropy",
    "dispatch",
    "elementwise",
    "embedding",
    "grad_norm",
    "grouped_matmul",
    "indexer",
    "indexer_loss",
    "layer_norm",
    "matmul",
    "muon",
    "rms_norm",
    "rope",
    "route",
    "router",
    "sparse_attention",
    "swiglu",
    "top_k",
]

_VISIBILITY = [
    "//autograd:__subpackages__",
    "//dist:__subpackages__",
    "//kernels:__subpackages__",
    "//tests:__subpackages__",
    "//tools:__subpackages__",
]

def kernel(
        name,
        deps = [],
        hdrs = [],
        srcs = [],
        cpu_deps = [],
        cuda_deps = [],
        nvcc_copts = [],
        test_srcs = [],
        test_deps = [],
        test_data = [],
        test_size = "small",
        test_tags = [],
        bench_deps = [],
        copts = [],
        visibility = None):
    """Declares an op from the files that its folder holds.

    * :<name>           <name>.h, <name>_cpu.cc and, in a CUDA build, <name>*.cu
    * :<name>_test      <name>_test.cc, on the CPU
    * :<name>_gpu_test  the same objects, tagged gpu, in a CUDA build alone
    * :<name>_cases     the test's objects, for a binary of all tests
    * :fast             <name>_fast.h, which way the op takes on CUDA
    * :<name>_fast_test <name>_fast_test.cc, on the CPU
    * :bench            <name>_bench.cc
    * :bench_lib        the same objects, for a binary of all benchmarks

    A target whose file is absent is not declared. The .cc files of all of them
    see TAPELINE_CUDA in a CUDA build.

    Args:
      name: the op and its folder.
      deps: of the library, beyond //kernels:kernel.
      hdrs: public headers beyond <name>.h.
      srcs: further .cc, .cu, .cuh and private .h files.
      cpu_deps: further deps that only the .cc files need (@openblas).
      cuda_deps: further deps of the CUDA build (@local_cuda//:cublasLt).
      nvcc_copts: further nvcc flags.
      test_srcs: further sources of the test.
      test_deps: further deps of the test.
      test_data: files that the test reads.
      test_size: as in cc_test.
      test_tags: further tags of both tests.
      bench_deps: further deps of the benchmark.
      copts: for the host compiler, beyond KERNEL_COPTS.
      visibility: instead of autograd, dist, kernels, tests and tools.
    """
    visibility = visibility or _VISIBILITY
    copts = KERNEL_COPTS + copts
    if native.glob([name + "_fast.h"]):
        cc_library(
            name = "fast",
            hdrs = [name + "_fast.h"],
            visibility = visibility,
            deps = ["//kernels:kernel"],
        )
        deps = deps + [":fast"]
        cc_test(
            name = name + "_fast_test",
            size = "small",
            srcs = [name + "_fast_test.cc"],
            deps = [
                ":fast",
                "//kernels:kernel",
                "@googletest//:gtest_main",
            ],
        )
    cuda_library(
        name = name,
        srcs = native.glob(
            [name + "_cpu.cc", name + "*.cu", name + "*.cuh", name + "_cuda.h"],
        ) + srcs,
        hdrs = native.glob([name + ".h"]) + hdrs,
        copts = copts,
        cuda_deps = cuda_deps,
        nvcc_copts = nvcc_copts,
        visibility = visibility,
        deps = ["//kernels:cuda", "//kernels:kernel"] + deps + cpu_deps,
    )

    if native.glob([name + "_test.cc"]):
        cc_library(
            name = name + "_cases",
            testonly = True,
            srcs = [name + "_test.cc"] + test_srcs,
            copts = copts,
            local_defines = if_cuda(["TAPELINE_CUDA=1"]),
            visibility = visibility,
            deps = [
                ":" + name,
                "//kernels:kernel",
                "//tests/support:close",
                "@googletest//:gtest",
            ] + deps + test_deps,
            # Nothing refers to a test by name.
            alwayslink = True,
        )
        for suffix, main, tags, compatible in [
            ("_test", "@googletest//:gtest_main", [], []),
            ("_gpu_test", "//tests/support:gpu_main", ["gpu"], CUDA_ONLY),
        ]:
            cc_test(
                name = name + suffix,
                size = test_size,
                data = test_data,
                tags = tags + test_tags,
                target_compatible_with = compatible,
                deps = [
                    ":%s_cases" % name,
                    main,
                ],
            )

    if native.glob([name + "_bench.cc"]):
        cc_library(
            name = "bench_lib",
            testonly = True,
            srcs = [name + "_bench.cc"],
            copts = copts,
            local_defines = if_cuda(["TAPELINE_CUDA=1"]),
            visibility = visibility,
            deps = [
                ":" + name,
                "//kernels:kernel",
                "//kernels/bench:runner",
            ] + deps + bench_deps,
            alwayslink = True,
        )
        cc_binary(
            name = "bench",
            testonly = True,
            linkstatic = False,
            tags = ["bench"],
            deps = [
                ":bench_lib",
                "//kernels/bench",
            ],
        )
