#!/usr/bin/env python3
"""Tables of this folder's pages, from the raw JSON beside them.

    python3 tools/results/tables.py training FILE.jsonl    # a run's metrics
    python3 tools/results/tables.py benchmark FILE.json    # Google Benchmark
"""
import json
import sys


def training(path):
    rows = [json.loads(line) for line in open(path)]
    steps = [r for r in rows if "step_ms" in r]
    evals = [r for r in rows if "val_bits_per_byte" in r]
    wall = steps[-1]["time_unix"] - steps[0]["time_unix"] + steps[0]["step_ms"] / 1e3
    in_steps = sum(r["step_ms"] for r in steps) / 1e3
    first = steps[0]["tokens"]
    print(f"- {len(steps)} steps of {first} tokens; from the first step's start to the last one's end {wall:.0f} s, "
          f"of which {in_steps:.0f} s in steps: {steps[-1]['tokens'] / in_steps:.0f} tokens per second")
    print(f"- peak resident memory {max(r['rss_peak_bytes'] for r in steps) / 2**20:.0f} MiB")
    print("\n| step | validation bits per byte |\n|---|---|")
    for r in evals:
        print(f"| {r['step']} | {r['val_bits_per_byte']:.3f} |")


def benchmark(path):
    runs = json.load(open(path))["benchmarks"]
    if "goal" in runs[0]:
        print("| case | ns | goal |\n|---|---|---|")
        for r in runs:
            print(f"| {r['name']} | {r['ns']:.0f} | {r['goal']:.0f} |")
        return
    print("| case | total ns | kernel and allocation ns | net ns |\n|---|---|---|---|")
    for r in runs:
        print(f"| {r['name']} | {r['total']:.0f} | {r['kernel']:.0f} | {r['net']:.0f} |")


{"training": training, "benchmark": benchmark}[sys.argv[1]](sys.argv[2])
