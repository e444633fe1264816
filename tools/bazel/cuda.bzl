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
]

def _nvcc_objects_impl(ctx):
    contexts = [dep[CcInfo].compilation_context for dep in ctx.attr.deps]
    objects = []
    for source in ctx.files.srcs:
        output = ctx.actions.declare_file(
            "_nvcc/%s/%s.o" % (ctx.label.name, source.basename),
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
        args.add("-x", "cu")
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
        "srcs": attr.label_list(allow_files = [".cu"]),
        "_nvcc": attr.label(
            allow_single_file = True,
            default = "@local_cuda//:bin/nvcc",
        ),
        "_toolkit": attr.label(default = "@local_cuda//:toolkit"),
    },
)

def nvcc_objects(name, srcs, hdrs = [], deps = [], copts = [], **kwargs):
    """Compiles .cu files to objects, to be listed among a cc_library's srcs.

    Args:
      name: of the target.
      srcs: .cu files.
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

def cuda_library(
        name,
        srcs = [],
        hdrs = [],
        cpu_srcs = [],
        deps = [],
        cuda_deps = [],
        copts = [],
        nvcc_copts = [],
        **kwargs):
    """A library with a CUDA side and, where cpu_srcs or hdrs say so, a CPU one.

    A --config=cuda build compiles the .cu sources by nvcc and everything else
    by the host compiler, with TAPELINE_CUDA defined; any other build takes the
    .cc sources and needs no toolkit.

    Args:
      name: of the library.
      srcs: .cc and .cu files; the .cu files count in a CUDA build alone.
      hdrs: headers.
      cpu_srcs: .cc files of the build without CUDA alone (stubs).
      deps: of both builds.
      cuda_deps: of the CUDA build, e.g. @local_cuda//:cublas.
      copts: for the host compiler.
      nvcc_copts: for nvcc.
      **kwargs: passed to cc_library.
    """
    cu_srcs = [src for src in srcs if src.endswith(".cu")]
    objects = []
    if cu_srcs:
        objects = [":%s_nvcc" % name]
        nvcc_objects(
            name = name + "_nvcc",
            testonly = kwargs.get("testonly", False),
            srcs = cu_srcs,
            hdrs = hdrs + [src for src in srcs if src.endswith((".h", ".cuh"))],
            copts = ["-DTAPELINE_CUDA=1"] + nvcc_copts,
            deps = deps + cuda_deps,
        )
    cc_library(
        name = name,
        srcs = [src for src in srcs if not src.endswith((".cu", ".cuh"))] +
               if_cuda(objects, cpu_srcs),
        hdrs = hdrs,
        copts = copts,
        local_defines = kwargs.pop("local_defines", []) +
                        if_cuda(["TAPELINE_CUDA=1"]),
        deps = deps + if_cuda(
            ["@local_cuda//:cudart", "@local_cuda//:headers"] + cuda_deps,
        ),
        **kwargs
    )
