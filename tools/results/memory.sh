#!/bin/bash
# Peaks of tiny, scaled up, under each way to save memory, beside their plans:
# one JSON line per way on stdout, for tables.py memory.
#
#   bazel build -c opt //tools:tapeline
#   tools/results/memory.sh bazel-bin/tools/tapeline >memory.jsonl
#
# Every way is a process of its own: two steps of one micro-batch of 4,096
# tokens, without evaluation. Resident bytes are VmHWM of the second step.
set -euo pipefail
binary=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
way() {
  local name=$1
  shift
  local sets=(--set train.steps=2 --set train.seq_len=4096
    --set train.micro_batches=1 --set "run.dir=$folder" --set "run.name=$name"
    --set train.eval_every=0 --set train.sample_every=0
    --set train.snapshot_every=0 --set data.val= --set offload.strict=true "$@")
  "$binary" plan --config configs/tiny.toml --json "${sets[@]}" \
    >"$folder/$name.plan"
  "$binary" train --config configs/tiny.toml "${sets[@]}" >"$folder/$name.log"
  python3 - "$name" "$folder" "$*" <<'PY'
import json
import sys

name, folder, sets = sys.argv[1:]
plan = json.load(open(f"{folder}/{name}.plan"))
step = [json.loads(line) for line in open(f"{folder}/{name}/metrics.jsonl")][1]
kept = sum(layer["kept_bytes"] for layer in plan["layers"])
row = {"way": name, "settings": sets.replace("--set ", "")}
for key in ("peak_bytes", "parameter_bytes", "gradient_bytes",
            "optimizer_bytes", "head_bytes", "offload_bytes", "replays"):
    row[f"planned_{key}"] = plan[key]
row["planned_kept_bytes"] = kept
for key in ("pool_peak_bytes", "rss_peak_bytes", "pinned_bytes",
            "offload_bytes", "replays", "step_ms", "offload_exposed_ms"):
    row[key] = step[key]
print(json.dumps(row))
PY
}
way none
way norms --set recompute.drop_norms=true
way keep --set recompute.policy=keep --set 'recompute.keep=["sparse_attention", "combine"]'
way half --set recompute.policy=ratio --set recompute.ratio=0.5
way full --set recompute.policy=full
way offload --set offload.activations=true --set offload.ids=true
way full_offload --set recompute.policy=full --set offload.activations=true --set offload.ids=true
