#!/usr/bin/env python3
"""Tests that pages of tools/results say what their raw lines say."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

FOLDER = pathlib.Path(
    os.path.realpath("WORKSPACE")).parent / "tools" / "results"
# Kinds of tables.py whose whole output is on the page, by the files' first word.
WHOLE = ("kernels", "memory", "passes", "pipeline", "sanitizers")
# Their pages have some rows of it.
TRAINING = ("mini", "tiny")


def output(script, *words):
    done = subprocess.run([sys.executable, FOLDER / script, *map(str, words)],
                          capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def lines_of(script, *words):
    code, out, error = output(script, *words)
    if code != 0:
        raise AssertionError(error)
    return [line for line in out.splitlines() if line]


class Results(unittest.TestCase):

    def expect_in(self, lines, page):
        """All lines in the page's order, which may say more between them."""
        text = page.read_text().splitlines()
        at = 0
        for line in lines:
            self.assertIn(line, text[at:], f"{page.name}: not there, or not in this order")
            at = text.index(line, at) + 1

    def test_every_page_has_the_lines_of_its_raw_file(self):
        seen = 0
        for raw in sorted(FOLDER.glob("*.jsonl")):
            kind = raw.name.split("_")[0]
            page = raw.with_suffix(".md")
            with self.subTest(raw.name):
                if kind == "profiles":  # of the kernels' page
                    continue
                if kind in WHOLE:
                    profiles = [raw.with_name(raw.name.replace("kernels", "profiles"))] if kind == "kernels" else []
                    lines = lines_of("tables.py", kind, raw, *profiles)
                    self.expect_in(lines, page)
                elif kind in TRAINING:
                    lines = lines_of("tables.py", "training", raw)
                    rows = [line for line in page.read_text().splitlines() if re.match(r"\| \d", line)]
                    self.assertLess(1, len(rows))
                    self.assertLessEqual(set(rows), set(lines))
                else:
                    self.fail("no page is checked against this file")
                self.assertLess(4, len(lines))
                seen += 1
        self.assertLessEqual(7, seen)

    def test_floors_and_curves_are_those_of_their_files(self):
        for page in FOLDER.glob("passes_*.md"):
            copy, product = re.search(r"floors\.py FILE (\d+) (\d+)", page.read_text()).groups()
            self.expect_in(lines_of("floors.py", page.with_suffix(".jsonl"), copy, product), page)
        for curve in FOLDER.glob("*.svg"):
            _, out, _ = output("curve.py", curve.with_suffix(".jsonl"))
            self.assertEqual(out, curve.read_text())

    def test_another_number_is_found(self):
        page = next(FOLDER.glob("memory_*.md"))
        lines = lines_of("tables.py", "memory", page.with_suffix(".jsonl"))
        self.expect_in(lines, page)
        with self.assertRaises(AssertionError):
            self.expect_in([re.sub(r"\d", "7", line) for line in lines], page)
        with self.assertRaises(AssertionError):
            self.expect_in(lines[::-1], page)

    def expect_one_line(self, script, *words):
        code, out, error = output(script, *words)
        self.assertNotEqual(code, 0)
        self.assertEqual(out, "")
        self.assertEqual(error.count("\n"), 1, error)

    def test_bad_input_is_one_line(self):
        with tempfile.TemporaryDirectory() as folder:
            cut = pathlib.Path(folder) / "cut.jsonl"
            cut.write_text('{"tool": "memcheck", "te')
            empty = pathlib.Path(folder) / "empty.jsonl"
            empty.write_text("")
            for words in ([], ["kernels"], ["what", cut], ["kernels", cut.with_name("none")],
                          *[[kind, file] for kind in WHOLE + ("training", "benchmark", "misses")
                            for file in (cut, empty)]):
                with self.subTest(words):
                    self.expect_one_line("tables.py", *words)
            for words in ([], [cut, 1, 1], [empty, 1, 1], [cut.with_name("none"), 1, 1], [cut, "fast", 1]):
                with self.subTest(words):
                    self.expect_one_line("floors.py", *words)


if __name__ == "__main__":
    unittest.main()
