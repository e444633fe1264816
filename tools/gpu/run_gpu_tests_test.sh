#!/bin/sh
# run_gpu_tests.py with made-up binaries: what it counts, and when it fails.
set -u
script="$PWD/tools/gpu/run_gpu_tests.py"
cd "$(mktemp -d)" || exit 2
mkdir -p tests/data/dsv3 tests/data/glm_kernel

cat > gpu_tests <<'FAKE'
#!/usr/bin/env python3
import json, os, sys
tests = [("Loop", "Table", "/w/kernels/norm/norm_test.cc", None),
         ("Cases/Param", "Equals/small", "kernels/route/route_test.cc", "1"),
         ("Cases/Param", "Equals/large", "kernels/route/route_test.cc", "2"),
         ("Tape", "Records", "autograd/tape_test.cc", None)]
if sys.argv[0].endswith("child_tests"):
    tests = [("Steady", "Step", "tests/gpu/steady_step_test.cc", None),
             ("TwoGpus", "Agree", "tests/gpu/pipeline_test.cc", None)]
if "=Nothing" in " ".join(sys.argv):
    tests = []
tests = [t for t in tests if "TwoGpus" not in t or "-TwoGpus.*" not in
         " ".join(sys.argv)]
for flag in sys.argv[1:]:
    if flag.startswith("--gtest_output=json:"):
        suites = [{"name": s, "testsuite": [
            dict({"name": n, "file": f}, **({"value_param": v} if v else {}))]}
            for s, n, f, v in tests
            if "Tape" in s or "=Tape*" not in " ".join(sys.argv)]
        json.dump({"testsuites": suites}, open(flag[20:], "w"))
        sys.exit(0)
chosen = os.environ["GTEST_FILTER"].split(":")
for s, n, f, v in tests:
    name = f"{s}.{n}"
    if name not in chosen:
        continue
    print(f"[ RUN      ] {name}")
    if n == "Table" and os.environ.get("TAPELINE_COUNT_CASES"):
        print(f"[  CASES   ] {os.environ.get('FINISHED', '3')} of 3")
    result = "  FAILED  " if name == os.environ.get("BROKEN") else "       OK "
    print(f"[{result}] {name}{', where' if 'F' in result else ''} (1 ms)")
sys.exit(int(os.environ.get("END", "0")))
FAKE
cat > nvidia-smi <<'FAKE'
#!/bin/sh
for i in $(seq "${GPUS:-1}"); do echo "GPU $i: made up"; done
FAKE
cat > compute-sanitizer <<'FAKE'
#!/bin/sh
echo "========= COMPUTE-SANITIZER"
while [ "$1" != ./gpu_tests ]; do shift; done
"$@"
code=$?
[ -n "${SILENT:-}" ] || echo "========= ERROR SUMMARY: ${REPORTS:-0} errors"
exit $code
FAKE
chmod +x gpu_tests nvidia-smi compute-sanitizer
cp gpu_tests child_tests
PATH="$PWD:$PATH"
unset CUDA_VISIBLE_DEVICES

expect() {  # the exit code, a line, and the arguments
  code=$1 line=$2
  shift 2
  out=$(python3 "$script" "$@")
  got=$?
  if [ $got -ne "$code" ] || ! printf '%s\n' "$out" | grep -qF -- "$line"; then
    echo "want $code and \"$line\", got $got and:"
    echo "$out"
    exit 1
  fi
}

expect 0 'norm: cases run 3 / cases in tables 3'
expect 0 'route: cases run 2 / cases in tables 2'
expect 0 '5 passed, 0 failed, 0 skipped'
expect 0 'fewer than two GPUs: tests TwoGpus.* are left out'
GPUS=2 expect 0 '6 passed, 0 failed, 0 skipped'
GPUS=2 BROKEN=TwoGpus.Agree expect 1 '5 passed, 1 failed, 0 skipped'
BROKEN=Steady.Step expect 1 'FAILED Steady.Step'
GPUS=2 CUDA_VISIBLE_DEVICES=0 expect 0 '5 passed, 0 failed, 0 skipped'
# A loop that was left early.
FINISHED=2 expect 1 'norm: cases run 2 / cases in tables 3, which differ'
# An op whose tables nobody goes through.
FINISHED=0 expect 1 'norm: cases run 0 / cases in tables 3, which differ'
BROKEN=Cases/Param.Equals/large expect 1 \
  'route: cases run 1 / cases in tables 2, which differ'
# What was not asked for may be missing.
expect 0 'route: cases run 0 / cases in tables 2' --filter='Tape*'
# But something must be asked for.
expect 2 '' --filter='Nothing*'
expect 2 '' --filter='Nothing*' --sanitizer=memcheck
# A program that is not there, and one that fails after its tests.
expect 2 '' --binary ./missing
expect 2 '' --log=missing/log
expect 2 '' --xml=missing/xml
expect 2 '' --timeout=0
expect 2 '' --limit=nan
echo broken > tests/data/broken.tar.xz
expect 2 ''
rm tests/data/broken.tar.xz
END=6 expect 1 './gpu_tests: a process ended with 6 after its tests'
END=6 expect 1 'norm: a process ended with 6 after its tests' \
  --sanitizer=racecheck
SILENT=1 expect 1 'route: memcheck did not sum up' --sanitizer=memcheck
# Under a sanitizer: ops alone, and a report is a failure.
expect 0 'initcheck: 0 processes with reports' --sanitizer=initcheck
expect 0 '3 passed, 0 failed, 0 skipped' --sanitizer=racecheck
REPORTS=4 expect 1 'memcheck: 2 processes with reports' --sanitizer=memcheck
REPORTS=4 expect 1 'memcheck found in norm: ERROR SUMMARY: 4 errors' \
  --sanitizer=memcheck
# An op's tests may be spread over processes.
REPORTS=4 expect 1 'memcheck: 3 processes with reports' --sanitizer=memcheck \
  --tests_per_process=1
expect 0 '3 passed, 0 failed, 0 skipped' --sanitizer=racecheck \
  --tests_per_process=1
expect 2 '' --tests_per_process=0
BROKEN=Loop.Table expect 1 '2 passed, 1 failed, 0 skipped' --sanitizer=synccheck
