"""device_test(): a test of the CPU that also runs on a GPU."""

load("@rules_cc//cc:defs.bzl", "cc_library", "cc_test")
load("//tools/bazel:cuda.bzl", "CUDA_ONLY")

def device_test(name, srcs, deps, data = [], size = "small", tags = []):
    """Declares a test twice, from the same objects.

    * :x_test      on the CPU
    * :x_gpu_test  on a GPU, tagged gpu, in a CUDA build alone
    * :x_cases     the objects, for a binary of all tests

    Args:
      name: ends in _test.
      srcs: as in cc_test.
      deps: as in cc_test, without a main.
      data: as in cc_test.
      size: as in cc_test.
      tags: of both tests.
    """
    stem = name[:-len("_test")]
    cc_library(
        name = stem + "_cases",
        testonly = True,
        srcs = srcs,
        visibility = ["//tests/gpu:__pkg__"],
        deps = deps + ["@googletest//:gtest"],
        # Nothing refers to a test by name.
        alwayslink = True,
    )
    for suffix, main, own_tags, compatible in [
        ("_test", "@googletest//:gtest_main", [], []),
        ("_gpu_test", "//tests/support:gpu_main", ["gpu"], CUDA_ONLY),
    ]:
        cc_test(
            name = stem + suffix,
            size = size,
            data = data,
            tags = tags + own_tags,
            target_compatible_with = compatible,
            deps = [
                ":%s_cases" % stem,
                main,
            ],
        )
