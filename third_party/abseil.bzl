"""The system's Abseil under upstream's labels.

The packages carry one pkg-config file per library. They become one target
each, with the dependencies that the files state, so that shared and static
linking both get the right libraries in the right order.
"""

load("//third_party:system_library.bzl", "fail_missing", "import_library")

_LIB_DIRS = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"]

# Upstream label -> the pkg-config files that make it up.
_LABELS = {
    "algorithm:algorithm": ["algorithm"],
    "algorithm:container": ["algorithm_container"],
    "base:base": ["base"],
    "base:config": ["config"],
    "base:core_headers": ["core_headers"],
    "base:endian": ["endian"],
    "base:log_severity": ["log_severity"],
    "base:prefetch": ["prefetch"],
    "cleanup:cleanup": ["cleanup"],
    "container:btree": ["btree"],
    "container:fixed_array": ["fixed_array"],
    "container:flat_hash_map": ["flat_hash_map"],
    "container:flat_hash_set": ["flat_hash_set"],
    "container:inlined_vector": ["inlined_vector"],
    "container:node_hash_map": ["node_hash_map"],
    "container:node_hash_set": ["node_hash_set"],
    "debugging:failure_signal_handler": ["failure_signal_handler"],
    "debugging:stacktrace": ["stacktrace"],
    "debugging:symbolize": ["symbolize"],
    "flags:commandlineflag": ["flags_commandlineflag"],
    "flags:config": ["flags_config"],
    "flags:flag": ["flags"],
    "flags:marshalling": ["flags_marshalling"],
    "flags:parse": ["flags_parse"],
    "flags:reflection": ["flags_reflection"],
    "flags:usage": ["flags_usage"],
    "functional:any_invocable": ["any_invocable"],
    "functional:bind_front": ["bind_front"],
    "functional:function_ref": ["function_ref"],
    "hash:hash": ["hash"],
    "memory:memory": ["memory"],
    "meta:type_traits": ["type_traits"],
    "numeric:bits": ["bits"],
    "numeric:int128": ["int128"],
    "random:bit_gen_ref": ["random_bit_gen_ref"],
    "random:distributions": ["random_distributions"],
    "random:random": ["random_random"],
    "status:status": ["status"],
    "status:statusor": ["statusor"],
    "strings:cord": ["cord"],
    "strings:str_format": ["str_format"],
    "strings:strings": ["strings"],
    "synchronization:synchronization": ["synchronization"],
    "time:time": ["time"],
    "types:any": ["any"],
    "types:optional": ["optional"],
    "types:span": ["span"],
    "types:variant": ["variant"],
    "utility:utility": ["utility"],
}

def _parse(text):
    """Returns the names required and the -l libraries of a .pc file."""
    requires = []
    libs = []
    for line in text.split("\n"):
        key, _, value = line.partition(":")
        if key in ["Requires", "Requires.private"]:
            for item in value.split(","):
                name = item.strip().split(" ")[0]
                if name.startswith("absl_"):
                    requires.append(name)
        elif key in ["Libs", "Libs.private"]:
            libs.extend([
                word[len("-l"):]
                for word in value.split(" ")
                if word.startswith("-l")
            ])
    return requires, libs

def _system_abseil_impl(repository_ctx):
    folder = None
    for lib_dir in _LIB_DIRS:
        path = repository_ctx.path(lib_dir + "/pkgconfig")
        if path.get_child("absl_strings.pc").exists:
            folder = path
            break
    if not folder:
        fail_missing(repository_ctx, "Abseil (libabsl-dev)")

    build = ['package(default_visibility = ["//absl:__subpackages__"])\n']
    known = []
    for file in folder.readdir():
        if not file.basename.startswith("absl_") or \
           not file.basename.endswith(".pc"):
            continue
        name = file.basename[:-len(".pc")]
        known.append(name)
        requires, libs = _parse(repository_ctx.read(file))
        deps = [":" + r for r in requires]
        for lib in libs:
            # The rest is -latomic "as needed", which x86-64 does not need.
            if lib.startswith("absl_"):
                build.append('cc_import(\n    name = "{}_import",\n{})\n'.format(
                    lib,
                    import_library(repository_ctx, [lib_dir], lib),
                ))
                deps.insert(0, ":%s_import" % lib)
        build.append(
            "cc_library(\n" +
            '    name = "%s",\n' % name +
            '    linkopts = ["-pthread"],\n' +
            "    deps = %r,\n" % deps +
            ")\n",
        )
    repository_ctx.file("BUILD.bazel", "\n".join(build))

    packages = {}
    for label, parts in _LABELS.items():
        package, _, name = label.partition(":")
        missing = [p for p in parts if "absl_" + p not in known]
        if missing:
            continue
        packages.setdefault(package, []).append(
            "cc_library(\n" +
            '    name = "%s",\n' % name +
            "    deps = %r,\n" % ["//:absl_" + p for p in parts] +
            ")\n",
        )
    repository_ctx.file("absl/BUILD.bazel", "")
    for package, rules in packages.items():
        repository_ctx.file(
            "absl/%s/BUILD.bazel" % package,
            'package(default_visibility = ["//visibility:public"])\n\n' +
            "\n".join(rules),
        )

system_abseil = repository_rule(
    implementation = _system_abseil_impl,
    local = True,
)
