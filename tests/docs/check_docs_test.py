#!/usr/bin/env python3
"""Tests tools/check_docs, on a tree with faults, and on this one."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

TOOL = pathlib.Path(
    os.path.realpath("WORKSPACE")).parent / "tools" / "check_docs"


def run(tool):
    return subprocess.run([tool], capture_output=True, text=True, check=False)


class CheckDocs(unittest.TestCase):

    def test_finds_what_is_not_there(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name in ("tools", "docs", "a"):
                (root / name).mkdir()
            shutil.copy(TOOL, root / "tools")
            (root / "a/b_test.cc").write_text(
                "TEST(Suite, Holds) {}\nTYPED_TEST(Typed, Too) {}\n")
            (root / "docs/page.md").write_text(
                "`Suite.Holds` `Suite.Ho…` `Typed.Too` `a/b_test.cc:1`\n"
                "[here](page.md) [root](../README.md) `runs/x/metrics.jsonl`\n"
                "`Suite.Fails`\n"
                "`Other.Ho…` `a/c.cc:3`\n"
                "[gone](none.md)\n")
            (root / "README.md").write_text("`docs/page.md`\n")
            subprocess.run(["git", "init", "-q", folder], check=True)
            subprocess.run(["git", "-C", folder, "add", "."], check=True)
            done = run(root / "tools/check_docs")
            self.assertEqual(done.stdout.splitlines(), [
                "docs/page.md:3: no test is called Suite.Fails",
                "docs/page.md:4: no test is called Other.Ho…",
                "docs/page.md:4: there is no a/c.cc",
                "docs/page.md:5: the link leads nowhere: none.md",
                "2 documents, 2 tests, 4 faults",
            ])
            self.assertEqual(done.returncode, 1)

    def test_this_tree_has_none(self):
        done = run(TOOL)
        self.assertEqual(done.returncode, 0, done.stdout)


if __name__ == "__main__":
    unittest.main()
