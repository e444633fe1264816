#!/usr/bin/env python3
"""tools/count_tests, run on build events and XML files made here."""

import json
import pathlib
import subprocess
import tempfile
import unittest

SCRIPT = pathlib.Path("WORKSPACE").resolve().parent / "tools" / "count_tests"

GTEST = """<?xml version="1.0" encoding="UTF-8"?>
<testsuites tests="5" failures="1" disabled="1" errors="0" name="AllTests">
  <testsuite name="A" tests="5" failures="1" disabled="1" skipped="1">
    <testcase name="Passes" status="run" result="completed" />
    <testcase name="PassesToo" status="run" result="completed" />
    <testcase name="Fails" status="run" result="completed">
      <failure message="no" type=""><![CDATA[no]]></failure>
    </testcase>
    <testcase name="Skips" status="run" result="skipped">
      <skipped message="no device"><![CDATA[no device]]></skipped>
    </testcase>
    <testcase name="DISABLED_Never" status="notrun" result="suppressed" />
  </testsuite>
</testsuites>
"""

PASSES = """<testsuites><testsuite name="A" tests="1" failures="0" errors="0">
  <testcase name="A" status="run" duration="0" time="0"></testcase>
</testsuite></testsuites>
"""

# What Bazel writes for a shell test that fails, and for a crash.
ERROR = """<testsuites><testsuite name="A" tests="1" failures="0" errors="1">
  <testcase name="A" status="run" duration="0" time="0">
    <error message="exited with error code 6"></error>
  </testcase>
</testsuite></testsuites>
"""


class CountTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.events = [{"id": {"started": {}}, "started": {}}]

    def configured(self, label, kind="cc_test rule"):
        self.events.append({
            "id": {"targetConfigured": {"label": label}},
            "configured": {"targetKind": kind},
        })

    def completed(self, label, success=True):
        event = {"id": {"targetCompleted": {"label": label}}, "completed": {}}
        if success:
            event["completed"]["success"] = True
        self.events.append(event)

    def result(self, label, xml, status="PASSED", **key):
        """Adds a result; xml None: it left no XML file."""
        outputs = [{"name": "test.log", "uri": "file:///nowhere/test.log"}]
        if xml is not None:
            file = self.folder / f"{len(self.events)} test.xml"
            file.write_text(xml, encoding="utf-8")
            outputs.append({"name": "test.xml", "uri": file.as_uri()})
        self.events.append({
            "id": {"testResult": {"label": label, **key}},
            "testResult": {"status": status, "testActionOutput": outputs},
        })

    def count(self, finished=True):
        """Returns (exit code, stdout)."""
        if finished:
            self.events.append({"id": {"buildFinished": {}}, "finished": {}})
        file = self.folder / "events.json"
        file.write_text("".join(json.dumps(e) + "\n" for e in self.events),
                        encoding="utf-8")
        done = subprocess.run([str(SCRIPT), str(file)], check=False,
                              capture_output=True, encoding="utf-8")
        return done.returncode, done.stdout

    def test_cases_of_a_gtest_file(self):
        self.result("//a:t", GTEST, status="FAILED")
        self.assertEqual(self.count(), (1, "2 passed, 1 failed, 2 skipped\n"))

    def test_sum_over_targets_runs_and_shards(self):
        self.result("//a:t", PASSES)
        self.result("//a:u", PASSES, shard=1)
        self.result("//a:u", PASSES, shard=2)
        self.result("//a:v", PASSES, run=1)
        self.result("//a:v", PASSES, run=2)
        self.assertEqual(self.count(), (0, "5 passed, 0 failed, 0 skipped\n"))

    def test_only_the_last_attempt_counts(self):
        self.result("//a:t", ERROR, status="FAILED", attempt=1)
        self.result("//a:t", PASSES, attempt=2)
        self.assertEqual(self.count(), (0, "1 passed, 0 failed, 0 skipped\n"))

    def test_stale_xml_does_not_count(self):
        (self.folder / "test.xml").write_text(GTEST, encoding="utf-8")
        self.result("//a:t", PASSES)
        self.assertEqual(self.count(), (0, "1 passed, 0 failed, 0 skipped\n"))

    def test_crash_without_xml(self):
        self.result("//a:t", PASSES)
        self.result("//a:u", None, status="FAILED")
        self.result("//a:v", None, status="TIMEOUT")
        self.result("//a:w", "<testsuites><tests", status="FAILED")
        self.assertEqual(self.count(), (1, "1 passed, 3 failed, 0 skipped\n"))

    def test_crash_with_xml_by_bazel(self):
        self.result("//a:t", ERROR, status="FAILED")
        self.assertEqual(self.count(), (1, "0 passed, 1 failed, 0 skipped\n"))

    def test_failure_after_the_last_case(self):
        self.result("//a:t", PASSES, status="FAILED")
        self.assertEqual(self.count(), (1, "1 passed, 1 failed, 0 skipped\n"))

    def test_target_that_does_not_build(self):
        self.configured("//a:t")
        self.completed("//a:t", success=False)
        self.configured("//a:lib", "cc_library rule")
        self.completed("//a:lib", success=False)
        self.assertEqual(self.count(), (1, "0 passed, 1 failed, 0 skipped\n"))

    def test_target_that_completes_is_counted_by_its_result(self):
        self.configured("//a:t")
        self.completed("//a:t")
        self.result("//a:t", ERROR, status="FAILED")
        self.events.append({
            "id": {"testSummary": {"label": "//a:t"}},
            "testSummary": {"overallStatus": "FAILED"},
        })
        self.assertEqual(self.count(), (1, "0 passed, 1 failed, 0 skipped\n"))

    def test_incompatible_target_does_not_count(self):
        self.configured("//a:gpu_test")
        self.events.append({
            "id": {"targetCompleted": {"label": "//a:gpu_test"}},
            "aborted": {"reason": "SKIPPED"},
        })
        self.assertEqual(self.count(), (0, "0 passed, 0 failed, 0 skipped\n"))

    def test_unfinished_events(self):
        self.result("//a:t", PASSES)
        self.assertEqual(self.count(finished=False), (2, ""))

    def test_missing_events(self):
        done = subprocess.run([str(SCRIPT), str(self.folder / "none.json")],
                              check=False, capture_output=True)
        self.assertEqual((done.returncode, done.stdout), (2, b""))


if __name__ == "__main__":
    unittest.main()
