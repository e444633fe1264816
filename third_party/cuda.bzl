"""The CUDA toolkit: $CUDA_HOME, else /usr/local/cuda."""

load("//third_party:system_library.bzl", "find_file")

# Target -> the file below lib64 with the version that the loader asks for.
_SHARED = {
    "cublas": "libcublas.so.",
    "cublasLt": "libcublasLt.so.",
    "cudnn": "libcudnn.so.",
    "cupti": "libcupti.so.",
    "nccl": "libnccl.so.",
}

_HEADER = """
package(default_visibility = ["//visibility:public"])

exports_files(["bin/nvcc"])

filegroup(
    name = "toolkit",
    srcs = glob(["bin/**", "nvvm/**"]),
)

cc_library(
    name = "headers",
    hdrs = glob(["include/**"]),
    includes = ["include", "include/cccl"],
)

# Header-only: the profiler brings the library.
cc_library(
    name = "nvtx",
    linkopts = ["-ldl"],
    deps = [":headers"],
)

cc_import(
    name = "cudart_import",
    shared_library = "lib/{cudart}",
    static_library = "lib/libcudart_static.a",
)

cc_library(
    name = "cudart",
    linkopts = ["-ldl", "-lrt", "-pthread"],
    deps = [":cudart_import", ":headers"],
)
"""

_LIBRARY = """
cc_import(
    name = "{name}_import",
    shared_library = "lib/{file}",
)

cc_library(
    name = "{name}",
    deps = [":{name}_import", ":headers"],
)
"""

# Without a toolkit every target exists, so that //... can be analysed, and
# whatever compiles against one stops with the message.
_MISSING = """
package(default_visibility = ["//visibility:public"])

genrule(
    name = "toolkit",
    outs = ["no_cuda_toolkit.h"],
    cmd = "echo 'no CUDA toolkit at {home}: install CUDA 13 or set CUDA_HOME, " +
          "or build without --config=cuda' >&2; exit 1",
)

alias(
    name = "bin/nvcc",
    actual = ":toolkit",
)
"""

_MISSING_LIBRARY = """
cc_library(
    name = "{name}",
    hdrs = [":toolkit"],
)
"""

def _versioned(repository_ctx, folder, prefix):
    """Returns lib<x>.so.<major>: the shortest name with a version."""
    names = [
        f.basename
        for f in repository_ctx.path(folder).readdir()
        if f.basename.startswith(prefix)
    ]
    return sorted(names, key = len)[0] if names else None

def _system_cuda_impl(repository_ctx):
    home = repository_ctx.os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if not find_file(repository_ctx, [home], "bin/nvcc"):
        repository_ctx.file("BUILD.bazel", "".join(
            [_MISSING.format(home = home)] +
            [
                _MISSING_LIBRARY.format(name = name)
                for name in ["headers", "nvtx", "cudart"] + _SHARED.keys()
            ],
        ))
        return
    for folder in ["bin", "include", "nvvm"]:
        repository_ctx.symlink(home + "/" + folder, folder)
    lib64 = home + "/lib64"
    cudart = _versioned(repository_ctx, lib64, "libcudart.so.")
    for file in [cudart, "libcudart_static.a"]:
        repository_ctx.symlink(lib64 + "/" + file, "lib/" + file)
    build = [_HEADER.format(cudart = cudart)]
    for name, prefix in _SHARED.items():
        file = _versioned(repository_ctx, lib64, prefix)
        if file:
            repository_ctx.symlink(lib64 + "/" + file, "lib/" + file)
            build.append(_LIBRARY.format(name = name, file = file))
    repository_ctx.file("BUILD.bazel", "".join(build))

system_cuda = repository_rule(
    implementation = _system_cuda_impl,
    environ = ["CUDA_HOME"],
    local = True,
)
