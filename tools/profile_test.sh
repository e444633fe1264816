#!/bin/sh
# tools/profile --json on a page as ncu writes it, by a stand-in for ncu.
set -eu
profile=$PWD/tools/profile
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cat > "$dir/ncu" <<'NCU'
#!/bin/sh
echo "$@" > "$(dirname "$0")/arguments"
while [ "$1" != --log-file ]; do shift; done
cat "$(dirname "$0")/page.csv" > "$2"
exit $(cat "$(dirname "$0")/code")
NCU
cat > "$dir/bench" <<'BENCH'
#!/bin/sh
case "$*" in
  "nosuch --shape=1 --device=cuda --list") echo "no op is called nosuch" >&2; exit 64 ;;
esac
BENCH
chmod +x "$dir/ncu" "$dir/bench"
stall=smsp__average_warps_issue_stalled
cat > "$dir/page.csv" <<CSV
==PROF== Connected to process 1
"ID","Kernel Name","Block Size","Grid Size","dram__bytes.sum","gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum","sm__throughput.avg.pct_of_peak_sustained_elapsed","lts__throughput.avg.pct_of_peak_sustained_elapsed","sm__warps_active.avg.pct_of_peak_sustained_active","launch__registers_per_thread","${stall}_long_scoreboard_per_issue_active.ratio","${stall}_barrier_per_issue_active.ratio","${stall}_selected_per_issue_active.ratio","${stall}_long_scoreboard_not_issued_per_issue_active.ratio"
"","","","","byte","%","ns","%","%","%","register/thread","inst","inst","inst","inst"
"0","void <unnamed>::forward<(int)16, bf16>(Rows, float *)","(256, 1, 1)","(1,024, 1, 1)","33,554,432","61.25","13,300","20.5","40","88.8","32","6","1.5","1","99"
"1","add_up(int)","(32, 1, 1)","(1, 1, 1)","0","0.1","2,000","0.1","0.2","1.5","16","1","2","1","0"
CSV
echo 0 > "$dir/code"
export PATH="$dir:$PATH" TAPELINE_BENCH="$dir/bench"
"$profile" --json layernorm_fwd 65536x128 > "$dir/out"
expect() {
  grep -qF "$2" "$1" || { echo "no $2 in:"; cat "$1"; exit 1; }
}
[ "$(wc -l < "$dir/out")" = 2 ]
expect "$dir/out" '"op": "layernorm_fwd", "shape": "65536x128", "kernel": "forward<(int)16, bf16>"'
expect "$dir/out" '"us": 13.3, "dram_mb": 33.6, "dram_pct": 61.2'
expect "$dir/out" '"occupancy_pct": 88.8, "stall": "long_scoreboard", "stall_pct": 70.6'
expect "$dir/out" '"kernel": "add_up"'
expect "$dir/out" '"stall": "barrier", "stall_pct": 50.0'
expect "$dir/arguments" "bench layernorm_fwd --shape=65536x128 --device=cuda --profile_once"

# What ncu fails with, and what it says, reach the caller.
echo '==ERROR== no permission' > "$dir/page.csv"
echo 9 > "$dir/code"
code=0
"$profile" --json a 1 > "$dir/out" 2> "$dir/err" || code=$?
[ $code = 9 ]
expect "$dir/err" "no permission"
code=0
"$profile" --json a > "$dir/out" 2> "$dir/err" || code=$?
[ $code = 64 ]
expect "$dir/err" "usage: profile"

# Names are checked without ncu, and what is no program is not built instead.
fails() {  # CODE TEXT OP SHAPE
  code=0
  PATH=/usr/bin:/bin "$profile" "$3" "$4" > "$dir/out" 2> "$dir/err" || code=$?
  [ $code = "$1" ] && [ "$(wc -l < "$dir/err")" = 1 ] ||
    { echo "exit code $code, want $1:"; cat "$dir/err"; exit 1; }
  expect "$dir/err" "$2"
}
fails 64 "no op is called nosuch" nosuch 1
for TAPELINE_BENCH in "$dir/none" "$dir" "$dir/page.csv"; do
  fails 2 "TAPELINE_BENCH: $TAPELINE_BENCH is no program" a 1
done
