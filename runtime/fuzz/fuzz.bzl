"""fuzz_target(): a libFuzzer binary and the replay of its corpus."""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")

def fuzz_target(name, deps):
    """Declares the targets of <name>_fuzz.cc.

    * :<name>_fuzz    for --config=fuzz; takes libFuzzer's flags and a folder
    * :<name>_replay  a test that tries each file of corpus/<name> once

    Args:
      name: of the parser.
      deps: of <name>_fuzz.cc.
    """
    cc_binary(
        name = name + "_fuzz",
        testonly = True,
        srcs = [name + "_fuzz.cc"],
        linkopts = ["-fsanitize=fuzzer"],
        linkstatic = True,
        tags = ["fuzz", "manual"],
        deps = deps,
    )
    cc_test(
        name = name + "_replay",
        size = "small",
        srcs = [
            name + "_fuzz.cc",
            "//runtime/fuzz:replay_main.cc",
        ],
        args = ["%s/corpus/%s" % (native.package_name(), name)],
        data = native.glob(["corpus/%s/**" % name]),
        deps = deps,
    )
