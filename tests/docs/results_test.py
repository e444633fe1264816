#!/usr/bin/env python3
"""Tests that pages of tools/results say what their raw lines say."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
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

    def test_floors_count_the_weights_that_the_program_has(self):
        sys.path.insert(0, str(FOLDER))
        import floors  # pylint: disable=import-outside-toplevel
        seen = 0
        for page in FOLDER.glob("passes_*.jsonl"):
            rows = [json.loads(line) for line in page.read_text().splitlines()]
            for row in rows:
                config = re.search(r"configs/(\w+)\.toml", " ".join(row.get("provenance", {}).get("command_line", [])))
                if config is None or "params" not in row:
                    continue
                text = (FOLDER.parent.parent / "configs" / (config[1] + ".toml")).read_text()
                model = tomllib.loads(text)["model"]
                elements = floors.weights(model)
                # Everything but norms and biases; the embedding is as large as the head.
                count = sum(elements.values()) + elements["head"]
                self.assertLess(abs(row["params"] - count), 1e-4 * count, config[1])
                labels = {label for label, _ in floors.PURPOSES}
                self.assertLessEqual(set(floors.floors(model, 1, 8, False)), labels)
                seen += 1
        self.assertLess(2, seen)

    def test_floors_read_what_a_kernel_moves_from_its_launch(self):
        sys.path.insert(0, str(FOLDER))
        import floors  # pylint: disable=import-outside-toplevel
        # y = a + b of 16384 x 7168: a thread has two packs of 16 bytes of each.
        add = {"name": "map_packs<8, Add<bf16>, bf16, bf16, bf16>", "threads": 16384 * 7168 // 16, "bytes": 0}
        self.assertEqual(floors.bytes_of(add), 3 * 2 * 16384 * 7168)
        cast = {"name": "map_packs<4, Cast<float, bf16>, bf16, float>", "threads": 16384 * 7168 // 16, "bytes": 0}
        self.assertEqual(floors.bytes_of(cast), (4 + 2) * 16384 * 7168)
        self.assertEqual(floors.bytes_of({"name": "memset", "threads": 0, "bytes": 5}), 5)
        self.assertEqual(floors.bytes_of({"name": "rope_kernel<true>", "threads": 99, "bytes": 0}), 0)
        with tempfile.TemporaryDirectory() as folder:
            trace = pathlib.Path(folder) / "t.json"
            trace.write_text(json.dumps({"traceEvents": [
                {"ph": "M", "name": "thread_name"},
                {"ph": "X", "name": "a", "dur": 2.0, "args": {"grid": [3, 2, 1], "block": [64, 1, 1]}},
                {"ph": "X", "name": "memset", "dur": 4.0, "args": {"bytes": 7}},
                {"ph": "X", "name": "a", "dur": 1.0, "args": {"grid": [1, 1, 1], "block": [32, 1, 1]}}]}))
            code, out, _ = output("floors.py", "items", trace, "mini", 1, 4096)
        self.assertEqual(code, 0)
        self.assertEqual(json.loads(out)["items"], [
            {"name": "memset", "calls": 1, "us": 4.0, "threads": 0, "bytes": 7},
            {"name": "a", "calls": 2, "us": 3.0, "threads": 416, "bytes": 0}])

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
            for words in ([], [cut, 1, 1], [empty, 1, 1], [cut.with_name("none"), 1, 1], [cut, "fast", 1],
                          ["items", cut, "mini", 1, 1], ["items", empty, "mini", 1, 1], ["items", cut]):
                with self.subTest(words):
                    self.expect_one_line("floors.py", *words)


if __name__ == "__main__":
    unittest.main()
