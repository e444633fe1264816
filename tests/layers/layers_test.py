#!/usr/bin/env python3
"""Fails on an include that goes against the order of the folders.

    runtime <- kernels <- autograd <- dist <- models <- tools

A folder includes itself and what is to its left, except that models do not see
kernels: neither by an include of their own nor through the headers that they
include. Only tests and benchmarks, and what serves them, include tests/.
"""

import os
import pathlib
import re
import tempfile
import unittest

ALLOWED = {
    "runtime": {"runtime"},
    "kernels": {"runtime", "kernels"},
    "autograd": {"runtime", "kernels", "autograd"},
    "dist": {"runtime", "kernels", "autograd", "dist"},
    "models": {"runtime", "autograd", "dist", "models"},
    "tools": {"runtime", "kernels", "autograd", "dist", "models", "tools"},
    "tests": {"runtime", "kernels", "autograd", "dist", "models", "tools",
              "tests"},
}

# What the headers reached from these must not contain. A name that ends in a
# slash stands for every file of that folder but its tests.
CLOSURES = {
    "autograd/ops.h": "kernels",
    "models/": "kernels",
}

SUFFIXES = (".h", ".cuh", ".cc", ".cu")
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)


def is_test_code(path):
    """Tests, benchmarks (they check what they time), and what serves them."""
    stem = path.rsplit(".", 1)[0]
    return (path.startswith(("tests/", "kernels/bench/")) or
            "/testing/" in path or
            stem.endswith(("_test", "_testing", "_bench", "_fuzz")))


class Tree:
    """The sources below a root, by path relative to it."""

    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.includes = {}
        self.errors = []
        for folder in ALLOWED:
            for directory, _, files in os.walk(self.root / folder):
                for file in files:
                    if file.endswith(SUFFIXES):
                        self._read(pathlib.Path(directory) / file)

    def _read(self, file):
        path = file.relative_to(self.root).as_posix()
        self.includes[path] = []
        for name in INCLUDE.findall(file.read_text(encoding="utf-8")):
            if name.split("/")[0] in ALLOWED and ".." not in name:
                self.includes[path].append(name)
            elif (file.parent / name).is_file():
                # Such a name would pass by the checks below.
                self.errors.append(
                    f"{path} includes {name}: write the path from the root")

    def direct_violations(self):
        for path, names in sorted(self.includes.items()):
            folder = path.split("/")[0]
            allowed = ALLOWED[folder]
            if is_test_code(path):
                allowed = allowed | {"tests"}
            for name in names:
                if name.split("/")[0] not in allowed:
                    yield f"{path} includes {name}: {folder} may include " + \
                        ", ".join(sorted(allowed))

    def chain(self, start, folder):
        """The shortest way by includes from a file into a folder, or None."""
        came_from = {start: None}
        queue = [start]
        for path in queue:
            if path.split("/")[0] == folder:
                way = []
                while path:
                    way.append(path)
                    path = came_from[path]
                return way[::-1]
            for name in self.includes.get(path, []):
                if name not in came_from:
                    came_from[name] = path
                    queue.append(name)
        return None

    def transitive_violations(self):
        for root, folder in CLOSURES.items():
            for path in sorted(self.includes):
                if root.endswith("/"):
                    selected = path.startswith(root) and not is_test_code(path)
                else:
                    selected = path == root
                way = self.chain(path, folder) if selected else None
                if way:
                    yield f"{path} reaches {folder}: " + " -> ".join(way)

    def violations(self):
        return (self.errors + list(self.direct_violations()) +
                list(self.transitive_violations()))


def check(files):
    """The violations of a tree given as {path: content}."""
    with tempfile.TemporaryDirectory() as root:
        for path, content in files.items():
            file = pathlib.Path(root, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="utf-8")
        return Tree(root).violations()


GOOD = {
    "runtime/tensor.h": "#include <vector>\n",
    "kernels/add/add.h": '#include "runtime/tensor.h"\n',
    "kernels/add/add_test.cc": '#include "tests/support/close.h"\n',
    "autograd/ops.h": '#include "runtime/tensor.h"\n',
    "autograd/ops/add.cc": '#include "autograd/ops.h"\n'
                           '#include "kernels/add/add.h"\n',
    "models/layers.h": '#include "autograd/ops.h"\n',
    "tests/support/close.h": '#include "runtime/tensor.h"\n',
    "tools/main.cc": '#include "models/layers.h"\n'
                     '#include "kernels/add/add.h"\n',
}


class CheckerTest(unittest.TestCase):
    """The checker finds what is seeded, and nothing else."""

    def seeded(self, path, line):
        return check({**GOOD, path: GOOD.get(path, "") + line + "\n"})

    def test_accepts_the_order(self):
        self.assertEqual(check(GOOD), [])

    def test_direct(self):
        for path, name in [
            ("runtime/tensor.h", "kernels/add/add.h"),
            ("kernels/add/add.cu", "autograd/ops.h"),
            ("autograd/tape.h", "dist/mesh.h"),
            ("dist/mesh.h", "models/layers.h"),
            ("models/moe.cc", "kernels/add/add.h"),
            ("models/moe.cc", "tools/trainer.h"),
            ("tools/main.cc", "tests/support/close.h"),
            ("autograd/tape.cc", "tests/support/close.h"),
        ]:
            with self.subTest(path=path, name=name):
                found = self.seeded(path, f'#include "{name}"')
                self.assertTrue(
                    any(f"{path} includes {name}" in v for v in found), found)

    def test_angle_brackets_and_spaces(self):
        self.assertEqual(
            len(self.seeded("runtime/a.cc", "  # include <kernels/k.h>")), 1)

    def test_comment_is_no_include(self):
        self.assertEqual(
            self.seeded("runtime/a.cc", '// #include "kernels/k.h"'), [])

    def test_transitive(self):
        found = check({
            **GOOD,
            "autograd/ops.h": '#include "autograd/op.h"\n',
            "autograd/op.h": '#include "autograd/detail.h"\n',
            "autograd/detail.h": '#include "kernels/add/add.h"\n',
        })
        way = ("autograd/ops.h -> autograd/op.h -> autograd/detail.h -> "
               "kernels/add/add.h")
        self.assertEqual(found, [
            f"autograd/ops.h reaches kernels: {way}",
            f"models/layers.h reaches kernels: models/layers.h -> {way}",
        ])

    def test_cycle_ends(self):
        self.assertEqual(check({
            **GOOD,
            "models/a.h": '#include "models/b.h"\n',
            "models/b.h": '#include "models/a.h"\n',
        }), [])

    def test_relative_names(self):
        self.assertEqual(len(self.seeded("autograd/x.h", '#include "ops.h"')),
                         1)
        self.assertEqual(
            len(self.seeded("runtime/x.h",
                            '#include "../kernels/add/add.h"')), 1)


class TreeTest(unittest.TestCase):
    """This tree keeps the order."""

    def test_this_tree(self):
        root = pathlib.Path("WORKSPACE").resolve().parent
        tree = Tree(root)
        self.assertTrue(tree.includes, f"no sources below {root}")
        self.assertEqual(tree.violations(), [])


if __name__ == "__main__":
    unittest.main()
