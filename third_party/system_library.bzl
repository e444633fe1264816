"""A library of the system under its upstream label."""

# Debian's multiarch folders; elsewhere the loader finds the same names in /usr.
_LIB_DIRS = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"]
_INCLUDE_DIRS = ["/usr/include", "/usr/include/x86_64-linux-gnu"]

def find_file(repository_ctx, folders, name):
    """Returns the first of folders/name that exists, as a string, or None."""
    for folder in folders:
        path = folder + "/" + name
        if repository_ctx.path(path).exists:
            return path
    return None

def fail_missing(repository_ctx, what):
    fail("@{}: {} is missing; ./bazelw installs it".format(
        repository_ctx.name,
        what,
    ))

def import_library(repository_ctx, folders, library, soname = ""):
    """Links lib<library>.a and .so into the repository.

    Args:
      repository_ctx: of the repository rule.
      folders: where to look.
      library: the name behind -l.
      soname: the file name to give to the shared library, where the one that
        the loader would find by itself is not the wanted one.

    Returns:
      The attributes of a cc_import: a binary with linkstatic gets the archive,
      any other the shared library.
    """
    lines = []
    archive = find_file(repository_ctx, folders, "lib%s.a" % library)
    if archive:
        file = "lib/lib%s.a" % library
        repository_ctx.symlink(archive, file)
        lines.append('static_library = "%s",' % file)
    shared = soname or "lib%s.so" % library
    path = find_file(repository_ctx, folders, shared)
    if path:
        file = "lib/" + shared
        repository_ctx.symlink(path, file)
        lines.append('shared_library = "%s",' % file)
    if not lines:
        fail_missing(repository_ctx, "lib" + library)
    return "".join(["    %s\n" % line for line in lines])

def _system_library_impl(repository_ctx):
    attr = repository_ctx.attr
    include_dirs = [
        folder + ("/" + attr.include_dir if attr.include_dir else "")
        for folder in _INCLUDE_DIRS
    ]
    header = find_file(repository_ctx, include_dirs, attr.header)
    if not header:
        fail_missing(repository_ctx, attr.header)

    # Headers under /usr/include need no declaration: the compiler looks there.
    headers = ""
    if attr.include_dir:
        repository_ctx.symlink(header[:-len(attr.header) - 1], "include")
        headers = '    hdrs = glob(["include/**"]),\n' + \
                  '    includes = ["include"],\n'

    lib_dirs = [
        folder + ("/" + attr.lib_dir if attr.lib_dir else "")
        for folder in _LIB_DIRS
    ]
    build = ['package(default_visibility = ["//visibility:public"])\n']
    for name, dependency in attr.libraries.items():
        deps = [":" + dependency] if dependency else []
        if not attr.header_only:
            build.append('cc_import(\n    name = "{}_import",\n{})\n'.format(
                name,
                import_library(
                    repository_ctx,
                    lib_dirs,
                    name,
                    attr.sonames.get(name, ""),
                ),
            ))
            deps = [":%s_import" % name] + deps
        build.append(
            "cc_library(\n" +
            '    name = "%s",\n' % name +
            headers +
            "    defines = %r,\n" % attr.defines +
            "    linkopts = %r,\n" % attr.linkopts +
            "    deps = %r,\n" % deps +
            ")\n",
        )
    for name, actual in attr.aliases.items():
        build.append('alias(\n    name = "%s",\n    actual = ":%s",\n)\n' %
                     (name, actual))
    repository_ctx.file("BUILD.bazel", "\n".join(build))

system_library = repository_rule(
    implementation = _system_library_impl,
    local = True,
    attrs = {
        "aliases": attr.string_dict(doc = "label -> key of libraries"),
        "defines": attr.string_list(),
        "header": attr.string(mandatory = True, doc = "must exist"),
        "header_only": attr.bool(),
        "include_dir": attr.string(doc = "folder below /usr/include"),
        "lib_dir": attr.string(doc = "folder below /usr/lib/..."),
        "libraries": attr.string_dict(
            mandatory = True,
            doc = "lib<key>, and the key of the library that it needs",
        ),
        "linkopts": attr.string_list(),
        "sonames": attr.string_dict(),
    },
)
