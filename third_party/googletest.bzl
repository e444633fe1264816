"""GoogleTest, compiled from the sources that the system package installs.

The package's own libraries are archives only; a shared test helper and the test
that uses it would each get a copy of GoogleTest's globals. Compiling it also
lets the sanitizers see into it.
"""

load("//third_party:system_library.bzl", "fail_missing")

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "gtest",
    testonly = True,
    srcs = [
        "googlemock/src/gmock-all.cc",
        "googletest/src/gtest-all.cc",
    ],
    textual_hdrs = glob(
        [
            "googlemock/src/*.cc",
            "googletest/src/*.cc",
            "googletest/src/*.h",
        ],
        exclude = [
            "googlemock/src/gmock-all.cc",
            "googletest/src/gtest-all.cc",
        ],
    ),
    copts = [
        "-w",
        "-Iexternal/googletest/googletest",
        "-Iexternal/googletest/googlemock",
    ],
    linkopts = ["-pthread"],
)

cc_library(
    name = "gtest_main",
    testonly = True,
    srcs = ["googlemock/src/gmock_main.cc"],
    copts = ["-w"],
    deps = [":gtest"],
)
"""

def _system_googletest_impl(repository_ctx):
    source = repository_ctx.path("/usr/src/googletest")
    if not source.get_child("googletest").exists:
        fail_missing(repository_ctx, "GoogleTest (libgmock-dev)")
    for part in ["googlemock", "googletest"]:
        repository_ctx.symlink(
            source.get_child(part).get_child("src"),
            part + "/src",
        )
    repository_ctx.file("BUILD.bazel", _BUILD)

system_googletest = repository_rule(
    implementation = _system_googletest_impl,
    local = True,
)
