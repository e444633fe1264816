#!/usr/bin/env python3
"""Runs gpu_tests and child_tests, whatever becomes of a test, and counts.

    run_gpu_tests.sh [--filter=PATTERN] [--xml=FILE] [--log=FILE]
                     [--timeout=SECONDS] [--limit=SECONDS]
                     [--sanitizer=memcheck|racecheck|initcheck|synccheck]
                     [--jobs=N] [--tests_per_process=N]

A test that ends the process, or takes longer than --timeout, has failed, and
the tests after it run in a new process. With --limit tests still to come when
it is reached have failed, too. For every op below kernels/ it says how many
cases of its tables ran and how many they have, counted once for each test that
goes through a table; without --filter the two must be equal, and not 0. The
last line is "N passed, N failed, N skipped". Tests of two GPUs are left out where
there is one.

With --sanitizer the ops' tests run under that tool of compute-sanitizer, small
cases alone, each op in processes of its own, which have at most
--tests_per_process tests, --jobs of them at a time. A report is a failure.
Exit codes: 0, all passed; 1, some failed, were skipped or not run;
2, a flag is wrong or chooses no test, a program or a folder is missing, or an
archive is broken; 3, no GPU.
"""

import argparse
import collections
import concurrent.futures
import glob
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree

RUN = re.compile(r"\[ RUN      \] (\S+)$")
END = re.compile(r"\[ +(OK|FAILED|SKIPPED) +\] (\S+?),? .*\((\d+) ms\)$")
# What tests/support/cases.h says at a table's end.
CASES = re.compile(r"\[  CASES   \] (\d+) of (\d+)$")
# The last line of a sanitizer.
REPORT = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) ")
NO_GPU = 3

# Goldens that the bundle has no room for, and the tests that read them.
LARGE = {"dsv3": "*dsv3_*", "glm_kernel": "*glm_kernel*"}
# Tests of what GPUs say to each other.
TWO_GPUS = "TwoGpus.*"

# What is not small, so that a sanitizer would take minutes for each: thousands
# of launches for one derivative, or repeats.
NOT_SMALL = ["*FiniteDifferences*", "*IsTheDerivative*", "Large*", "Repeat*",
             "RealSizes*", "*Threads*", "*InALoop*", "*AnyBits*"]
# initcheck does not see what bulk stores (cp.async.bulk) write, and cuBLASLt
# writes with them: these tests read that on the device.
BULK_STORES = ["Matmul*"]


def positive(text):
    """Returns what a flag says, or lets argparse refuse it."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def seconds(text):
    """As positive(), of seconds."""
    value = float(text)
    if not value > 0:
        raise ValueError
    return value


def gpus():
    """Returns how many GPUs the driver has, or 0 where nothing can be asked."""
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True,
                              text=True, check=False).stdout
    except FileNotFoundError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = sum(line.startswith("GPU ") for line in said.splitlines())
    return count if visible is None else min(count, len(visible.split(",")))


def unpack():
    """Makes files of the archives that came along."""
    for path in glob.glob("tests/data/*.tar.xz"):
        if not os.path.isdir(path[:-len(".tar.xz")]):
            with tarfile.open(path) as archive:
                archive.extractall("tests/data")
    for path in glob.glob("external/king_james/*.xz"):
        if not os.path.exists(path[:-len(".xz")]):
            with lzma.open(path) as packed, open(path[:-3], "wb") as file:
                file.write(packed.read())


def list_tests(binary, pattern):
    """Returns the tests that the pattern selects: name -> what gtest says."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        done = subprocess.run(
            [binary, "--gtest_list_tests", "--gtest_filter=" + pattern,
             "--gtest_output=json:" + file.name],
            capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{binary} ended with {done.returncode}: {done.stderr}")
        suites = json.load(file)["testsuites"]
    return {f"{suite['name']}.{test['name']}": test
            for suite in suites for test in suite["testsuite"]}


def op_of(test):
    """Returns the folder below kernels/ that the test's file lies in."""
    match = re.search(r"(?:^|/)kernels/(\w+)/", test.get("file", ""))
    return match[1] if match else None


def count_cases(binary, results, loops):
    """Returns op -> [cases run, cases in tables], of all tests of the binary.

    A test with a value parameter is a case of the table that it was made from;
    a test that loops over a table has said how far it came.
    """
    ops = {}
    for name, test in list_tests(binary, "*").items():
        op = op_of(test)
        if op is None:
            continue
        count = ops.setdefault(op, [0, 0])
        if "value_param" in test:
            count[0] += results.get(name, ("",))[0] == "OK"
            count[1] += 1
        for run, cases in loops.get(name, []):
            count[0] += run
            count[1] += cases
    return ops


class Process:
    """One process of tests, which ends by itself, or by us when it is late."""

    def __init__(self, command, names, timeout, deadline, log, lock):
        self.results = {}  # name -> (result, seconds, text)
        self.loops = collections.defaultdict(list)  # name -> (run, cases)
        self.reports = []  # of a sanitizer
        self.summed_up = False  # by a sanitizer
        self.running = None
        self.late = False
        self._timeout = timeout
        self._deadline = deadline
        self._begin = time.monotonic()
        environment = dict(os.environ, GTEST_FILTER=":".join(names),
                           TAPELINE_COUNT_CASES="1")
        self._child = subprocess.Popen(
            command + ["--gtest_color=no"], env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True)
        watch = threading.Thread(target=self._watch, daemon=True)
        watch.start()
        text = []
        try:
            for line in self._child.stdout:
                with lock:
                    log.write(line)
                    log.flush()
                line = line.rstrip("\n")
                self._read(line, text)
            self.code = self._child.wait()
        finally:
            self._kill()
        if self.running:
            seconds = time.monotonic() - self._begin
            reason = (f"took longer than {timeout} s" if self.late else
                      f"ended the process with {self.code}")
            text.append(reason)
            self.results[self.running] = ("FAILED", seconds, "\n".join(text))

    def _read(self, line, text):
        if match := RUN.match(line):
            self.running = match[1]
            self._begin = time.monotonic()
            text.clear()
        elif (match := END.match(line)) and match[2] == self.running:
            self.results[match[2]] = (match[1], int(match[3]) / 1000,
                                      "\n".join(text))
            self.running = None
            self._begin = time.monotonic()
        elif match := REPORT.match(line):
            self.summed_up = True
            if match[1] != "0":
                self.reports.append(line)
        elif match := CASES.match(line):
            self.loops[self.running].append((int(match[1]), int(match[2])))
        else:
            text.append(line)

    def _watch(self):
        while self._child.poll() is None:
            now = time.monotonic()
            if now > self._begin + self._timeout or now > self._deadline:
                self.late = True
                self._kill()
                return
            time.sleep(0.2)

    def _kill(self):
        """Ends what is left of it, a sanitizer's own child as well."""
        try:
            os.killpg(self._child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class Run:
    """The tests of some binaries, and what became of them."""

    def __init__(self, options):
        self.names = []
        self.results = {}  # name -> (result, seconds, text)
        self.loops = {}
        self.reports = collections.Counter()  # of what, of a sanitizer
        self.ends = []  # of processes that failed after their tests
        self.no_gpu = False
        self._options = options
        self._deadline = time.monotonic() + options.limit
        self._log = open(options.log, "w", encoding="utf-8")
        self._lock = threading.Lock()

    def all_of(self, binary, names, command, label):
        """Runs the tests, in a new process after one that ended too soon."""
        left = list(names)
        with self._lock:
            self.names += left
        while left and time.monotonic() < self._deadline:
            process = Process(command, left, self._options.timeout,
                              self._deadline, self._log, self._lock)
            with self._lock:
                if process.code == NO_GPU and not process.results:
                    self.no_gpu = True
                    return
                self.results.update(process.results)
                self.loops.update(process.loops)
                for line in process.reports:
                    self.reports[f"{label}: {line.strip('= ')}"] += 1
                results = {result for result, _, _ in process.results.values()}
                if results and "FAILED" not in results and not process.late:
                    if process.code != 0 and not process.reports:
                        self.ends.append(f"{label}: a process ended with "
                                         f"{process.code} after its tests")
                    elif self._options.sanitizer and not process.summed_up:
                        self.ends.append(f"{label}: {self._options.sanitizer} "
                                         "did not sum up")
            before = len(left)
            left = [name for name in left if name not in process.results]
            if len(left) == before:
                print(f"{binary} ended with {process.code} before a test")
                break

    def sanitized(self, binary, pattern):
        """Runs the ops' small tests under a tool, op by op."""
        tool = self._options.sanitizer
        out = NOT_SMALL + (BULK_STORES if tool == "initcheck" else [])
        pattern += (":" if "-" in pattern else "-") + ":".join(out)
        ops = collections.defaultdict(list)
        for name, test in list_tests(binary, pattern).items():
            if op := op_of(test):
                ops[op].append(name)
        command = ["compute-sanitizer", "--tool", tool]
        if tool == "memcheck":
            # Calls that fail and are asked again are no faults.
            command += ["--report-api-errors", "no"]
        with concurrent.futures.ThreadPoolExecutor(self._options.jobs) as pool:
            # First a part of every op, of those with many parts before others.
            size = self._options.tests_per_process
            parts = [(first, op) for op in ops
                     for first in range(0, len(ops[op]), size)]
            parts.sort(key=lambda part: (part[0], -len(ops[part[1]])))
            runs = [pool.submit(self.all_of, binary,
                                ops[op][first:first + size],
                                command + [binary], op)
                    for first, op in parts]
        for run in runs:
            run.result()  # or what it met

    def finish(self):
        self._log.close()
        for name in self.names:
            self.results.setdefault(name, ("FAILED", 0, "was not reached"))


def write_xml(path, names, results):
    root = ElementTree.Element("testsuites")
    for name in names:
        suite, _, case = name.partition(".")
        result, seconds, text = results[name]
        node = ElementTree.SubElement(
            root, "testcase", classname=suite, name=case,
            time=f"{seconds:.3f}",
            result="skipped" if result == "SKIPPED" else "completed")
        if result == "FAILED":
            clean = "".join(c for c in text[-4000:] if c.isprintable() or
                            c == "\n")
            ElementTree.SubElement(node, "failure").text = clean
    ElementTree.ElementTree(root).write(path, encoding="unicode")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", nargs="+",
                        default=["./gpu_tests", "./child_tests"])
    parser.add_argument("--filter", default="*")
    parser.add_argument("--xml")
    parser.add_argument("--log", default=os.devnull)
    parser.add_argument("--timeout", type=seconds, default=120)
    parser.add_argument("--limit", type=seconds, default=float("inf"))
    parser.add_argument("--sanitizer", choices=[
        "memcheck", "racecheck", "initcheck", "synccheck"])
    parser.add_argument("--jobs", type=positive, default=8)
    parser.add_argument("--tests_per_process", type=positive, default=1000)
    options = parser.parse_args()

    needed = options.binary + (["compute-sanitizer"] if options.sanitizer
                               else [])
    for program in needed:
        if not shutil.which(program):
            print(f"{program} is not there, or is no program",
                  file=sys.stderr)
            return 2
    for path in filter(None, (options.log, options.xml)):
        try:
            with open(path, "a", encoding="utf-8"):
                pass
        except OSError as error:
            print(f"{path}: {error.strerror}", file=sys.stderr)
            return 2
    try:
        unpack()
    except (OSError, lzma.LZMAError, tarfile.TarError, EOFError) as error:
        print(f"tests/data: an archive cannot be unpacked: {error}",
              file=sys.stderr)
        return 2
    pattern = options.filter
    for golden, tests in LARGE.items():
        if not os.path.isdir("tests/data/" + golden):
            print(f"no tests/data/{golden}: tests {tests} are left out")
            pattern += (":" if "-" in pattern else "-") + tests
    if gpus() < 2:
        print(f"fewer than two GPUs: tests {TWO_GPUS} are left out")
        pattern += (":" if "-" in pattern else "-") + TWO_GPUS
    tests = Run(options)
    for binary in options.binary[:1] if options.sanitizer else options.binary:
        if options.sanitizer:
            tests.sanitized(binary, pattern)
        else:
            tests.all_of(binary, list_tests(binary, pattern), [binary], binary)
        if tests.no_gpu:
            print("no GPU", file=sys.stderr)
            return NO_GPU
    tests.finish()
    if not tests.names:
        print(f"no test is called {options.filter}", file=sys.stderr)
        return 2
    names, results = tests.names, tests.results

    suites = collections.defaultdict(collections.Counter)
    for name in names:
        result = results[name][0]
        suites[name.partition(".")[0]][result] += 1
        if result != "OK":
            lines = [x for x in results[name][2].splitlines() if x.strip()]
            print(f"{result} {name}")
            for line in lines[-1:] if "ended" in results[name][2] else []:
                print(f"    {line}")
    print(f"{len(suites)} suites, {len(names)} tests")
    for suite, count in sorted(suites.items()):
        print(f"  {suite}: {count['OK']} of {sum(count.values())} passed")
    differ = 0
    for op, (run, cases) in sorted(
            count_cases(options.binary[0], results, tests.loops).items()):
        same = run == cases and cases > 0
        differ += not same
        print(f"  {op}: cases run {run} / cases in tables {cases}"
              + ("" if same else ", which differ"))
    if options.filter != "*" or options.sanitizer:
        differ = 0  # what was not asked for did not run
    if options.xml:
        write_xml(options.xml, names, results)
    for report, times in sorted(tests.reports.items()):
        print(f"{options.sanitizer} found in {report} ({times} processes)")
    for end in tests.ends:
        print(end)
    if options.sanitizer:
        print(f"{options.sanitizer}: {sum(tests.reports.values())} processes "
              "with reports")
    total = sum(suites.values(), collections.Counter())
    print(f"{total['OK']} passed, {total['FAILED']} failed, "
          f"{total['SKIPPED']} skipped")
    return 1 if (total["FAILED"] or total["SKIPPED"] or differ or
                 tests.reports or tests.ends) else 0


if __name__ == "__main__":
    sys.exit(main())
