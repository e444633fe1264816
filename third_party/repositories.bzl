"""All external repositories of the project."""

load("//third_party:abseil.bzl", "system_abseil")
load("//third_party:cuda.bzl", "system_cuda")
load("//third_party:googletest.bzl", "system_googletest")
load("//third_party:system_library.bzl", "system_library")

def tapeline_repositories():
    """Declares every @repository that a BUILD file may name."""

    # Bazel's own files refer to these; undeclared ones would be downloaded.
    for stub in [
        "bazel_skylib",
        "remote_coverage_tools",
        "rules_cc",
        "rules_java",
        "rules_shell",
    ]:
        native.local_repository(name = stub, path = "third_party/" + stub)
    native.local_repository(
        name = "platforms",
        path = "/usr/share/bazel/platforms",
    )

    system_abseil(name = "abseil-cpp")
    system_cuda(name = "local_cuda")
    system_googletest(name = "googletest")
    native.local_repository(
        name = "king_james",
        path = "third_party/king_james",
    )

    system_library(
        name = "google_benchmark",
        header = "benchmark/benchmark.h",
        libraries = {
            "benchmark": "",
            "benchmark_main": "benchmark",
        },
        linkopts = ["-pthread"],
    )
    system_library(
        name = "nlohmann_json",
        header = "nlohmann/json.hpp",
        libraries = {"json": ""},
        header_only = True,
    )
    system_library(
        name = "tomlplusplus",
        header = "toml++/toml.h",
        libraries = {"tomlplusplus": ""},
        header_only = True,
    )
    system_library(
        name = "xxhash",
        header = "xxhash.h",
        libraries = {"xxhash": ""},
    )
    system_library(
        name = "zstd",
        header = "zstd.h",
        libraries = {"zstd": ""},
    )
    system_library(
        name = "pcre2",
        header = "pcre2.h",
        libraries = {"pcre2-8": ""},
        aliases = {"pcre2": "pcre2-8"},
        # pcre2.h refuses to be included without it.
        defines = ["PCRE2_CODE_UNIT_WIDTH=8"],
    )
    system_library(
        name = "utf8proc",
        header = "utf8proc.h",
        libraries = {"utf8proc": ""},
    )

    # The threaded flavour by its own folder: what plain -lopenblas means is a
    # system-wide alternative. It is told to use one thread of its own, because
    # its result bits change with the number of them; several threads of ours
    # call it at once, for which this flavour is built.
    system_library(
        name = "openblas",
        include_dir = "openblas-pthread",
        header = "cblas.h",
        lib_dir = "openblas-pthread",
        libraries = {"openblas": ""},
        sonames = {"openblas": "libopenblas.so.0"},
        linkopts = ["-lm", "-pthread"],
    )

    # Transport between processes on CPUs. Debian has the shared library alone.
    system_library(
        name = "gloo",
        header = "gloo/context.h",
        libraries = {"gloo": ""},
        sonames = {"gloo": "libgloo.so.0"},
    )
