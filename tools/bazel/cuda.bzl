"""CUDA sources: compiled by nvcc in a --config=cuda build, absent otherwise."""

load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_cc//cc/common:cc_info.bzl", "CcInfo")

_CUDA = "//tools/bazel:cuda"

# For target_compatible_with: the target exists in a CUDA build alone, and
# //... skips it in any other.
CUDA_ONLY = select({
    _CUDA: [],
    "//conditions:default": ["//tools/bazel:unavailable"],
})

# Of a binary for a machine that lacks the libraries of the build, besides
# glibc's and the driver's.
STANDALONE_LINKOPTS = [
    "-static-libgcc",
    "-Wl,--as-needed,-l:libstdc++.a",
]

def if_cuda(then, otherwise = []):
    """Returns a select of two lists: of a CUDA build, and of any other."""
    return select({
        _CUDA: then,
        "//conditions:default": otherwise,
    })

# Hopper with its architecture-specific instructions (wgmma, TMA).
_ARCH_FLAGS = ["-gencode=arch=compute_90a,code=sm_90a"]

_NVCC_FLAGS = _ARCH_FLAGS + [
    "-std=c++20",
    "-O3",
    "-lineinfo",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-Xcompiler=-fPIC,-Wall,-Wno-unused-parameter,-ffp-contract=off",
    # nvcc's host stubs trip these two without a fault of ours.
    "-Xcompiler=-Wno-unused-function",
    "-diag-suppress=20012",
    # A conversion of View<const T> to itself is never called.
    "-diag-suppress=554",
]

def _nvcc_objects_impl(ctx):
    contexts = [dep[CcInfo].compilation_context for dep in ctx.attr.deps]
    objects = []
    for source in ctx.files.srcs:
        output = ctx.actions.declare_file(
            "_nvcc/%s/%s.pic.o" % (ctx.label.name, source.basename),
        )
        args = ctx.actions.args()
        args.add_all(_NVCC_FLAGS)
        args.add_all(ctx.attr.copts)
        args.add("-I.")
        args.add(ctx.genfiles_dir.path, format = "-I%s")
        for context in contexts:
            args.add_all(context.defines, format_each = "-D%s")
            args.add_all(context.includes, format_each = "-I%s")
            args.add_all(context.quote_includes, format_each = "-I%s")
            args.add_all(context.system_includes, before_each = "-isystem")
        args.add("-x", "cu" if source.extension == "cu" else "c++")
        args.add("-c", source)
        args.add("-o", output)
        ctx.actions.run(
            executable = ctx.file._nvcc,
            arguments = [args],
            inputs = depset(
                [source] + ctx.files.hdrs + ctx.files._toolkit,
                transitive = [context.headers for context in contexts],
            ),
            outputs = [output],
            mnemonic = "CudaCompile",
            progress_message = "Compiling %s with nvcc" % source.short_path,
            use_default_shell_env = True,
        )
        objects.append(output)
    return [DefaultInfo(files = depset(objects))]

_nvcc_objects = rule(
    implementation = _nvcc_objects_impl,
    attrs = {
        "copts": attr.string_list(),
        "deps": attr.label_list(providers = [CcInfo]),
        "hdrs": attr.label_list(allow_files = True),
        "srcs": attr.label_list(allow_files = [".cc", ".cu"]),
        "_nvcc": attr.label(
            allow_single_file = True,
            default = "@local_cuda//:bin/nvcc",
        ),
        "_toolkit": attr.label(default = "@local_cuda//:toolkit"),
    },
)

def nvcc_objects(name, srcs, hdrs = [], deps = [], copts = [], **kwargs):
    """Compiles files with nvcc, to be listed among a cc_library's srcs.

    Args:
      name: of the target.
      srcs: .cu files, and .cc files that include CUDA's headers.
      hdrs: headers that they include and no dep declares.
      deps: libraries whose headers they include.
      copts: further nvcc flags.
      **kwargs: passed to the rule.
    """
    tags = kwargs.pop("tags", [])
    _nvcc_objects(
        name = name,
        srcs = srcs,
        hdrs = hdrs,
        deps = deps + ["@local_cuda//:headers"],
        copts = copts,
        # Only through its user: //... in a CPU build must not reach nvcc.
        tags = tags + ["manual"],
        **kwargs
    )

def _link_only_impl(ctx):
    merged = cc_common.merge_cc_infos(
        cc_infos = [dep[CcInfo] for dep in ctx.attr.deps],
    )
    return [CcInfo(linking_context = merged.linking_context)]

_link_only = rule(
    implementation = _link_only_impl,
    attrs = {"deps": attr.label_list(providers = [CcInfo])},
    doc = "Its deps for the linker, without their headers.",
)

def cuda_library(
        name,
        srcs = [],
        hdrs = [],
        cuda_srcs = [],
        cpu_srcs = [],
        deps = [],
        cuda_deps = [],
        copts = [],
        nvcc_copts = [],
        **kwargs):
    """A library with a part that exists in a --config=cuda build alone.

    Headers of the library must not include CUDA's: what depends on it compiles
    to the same objects in both builds, and is not compiled twice. CUDA's headers
    are for .cu files and cuda_srcs.

    Args:
      name: of the library.
      srcs: .cc files of both builds, and .cu and .cuh files. The .cc files see
        TAPELINE_CUDA in a CUDA build.
      hdrs: headers.
      cuda_srcs: .cc and .cu files of the CUDA build alone.
      cpu_srcs: .cc files of the build without CUDA alone (stubs).
      deps: of both builds.
      cuda_deps: of .cu files and cuda_srcs (@local_cuda//:cublas).
      copts: for the host compiler.
      nvcc_copts: for nvcc.
      **kwargs: passed to cc_library.
    """
    device_srcs = [src for src in srcs if src.endswith(".cu")] + cuda_srcs
    objects = []
    link_deps = []
    if device_srcs:
        testonly = kwargs.get("testonly", False)
        objects = [":%s_nvcc" % name]
        nvcc_objects(
            name = name + "_nvcc",
            testonly = testonly,
            srcs = device_srcs,
            hdrs = hdrs + [src for src in srcs if src.endswith((".h", ".cuh"))],
            copts = ["-DTAPELINE_CUDA=1"] + nvcc_copts,
            deps = deps + cuda_deps,
        )
        link_deps = [":%s_link" % name]
        _link_only(
            name = name + "_link",
            testonly = testonly,
            tags = ["manual"],
            deps = ["@local_cuda//:cudart"] + cuda_deps,
        )
    cc_library(
        name = name,
        srcs = [src for src in srcs if not src.endswith((".cu", ".cuh"))] +
               if_cuda(objects, cpu_srcs),
        hdrs = hdrs,
        copts = copts,
        local_defines = kwargs.pop("local_defines", []) +
                        if_cuda(["TAPELINE_CUDA=1"]),
        deps = deps + if_cuda(link_deps),
        **kwargs
    )
