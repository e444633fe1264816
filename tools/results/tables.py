#!/usr/bin/env python3
"""Tables of this folder's pages, from the raw JSON beside them.

    python3 tools/results/tables.py training FILE.jsonl    # a run's metrics
    python3 tools/results/tables.py benchmark FILE.json    # Google Benchmark
    python3 tools/results/tables.py memory FILE.jsonl      # memory.sh
    python3 tools/results/tables.py kernels FILE.jsonl     # rates of kernels
    python3 tools/results/tables.py passes FILE.jsonl      # tapeline bench
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


def memory(path):
    rows = [json.loads(line) for line in open(path)]

    def mib(bytes_):
        return f"{bytes_ / 2**20:.1f}"

    def live(row, peak):  # without what no way changes
        return row[peak] - sum(row[f"planned_{k}_bytes"] for k in ("parameter", "gradient", "optimizer", "head"))

    def resident(row):  # pinned memory is the host's
        return row["rss_peak_bytes"] - row["pinned_bytes"]

    first = rows[0]
    print("| way | planned peak | measured peak | measured / planned | kept for backward | copied out | replays "
          "| pool falls by | resident falls by | ratio |\n|---|---|---|---|---|---|---|---|---|---|")
    for r in rows:
        pool = first["pool_peak_bytes"] - r["pool_peak_bytes"]
        rss = resident(first) - resident(r)
        print(f"| {r['way']} | {mib(live(r, 'planned_peak_bytes'))} | {mib(live(r, 'pool_peak_bytes'))} "
              f"| {live(r, 'pool_peak_bytes') / live(r, 'planned_peak_bytes'):.4f} | {mib(r['planned_kept_bytes'])} "
              f"| {mib(r['offload_bytes'])} | {r['replays']} | {mib(pool)} | {mib(rss)} "
              f"| {'' if r is first else f'{rss / pool:.2f}'} |")
    print("\nMiB. Shown apart, the same for all ways: parameters "
          + ", ".join([mib(first["planned_parameter_bytes"]), "gradients " + mib(first["planned_gradient_bytes"]),
                       "optimizer " + mib(first["planned_optimizer_bytes"]), "heads " + mib(first["planned_head_bytes"])])
          + ".")


def kernels(path):
    print("| op | shape | who | us | TFLOP/s | of 790 |\n|---|---|---|---|---|---|")
    for r in (json.loads(line) for line in open(path)):
        shape = " ".join(f"{key}={value}" for key, value in r["shape"].items())
        rate = r.get("tflops") or 0
        print(f"| {r['op']} | {shape} | {r['impl']} | {r['us']:.0f} | {rate:.0f} | {rate / 790:.2f} |"
              if rate else f"| {r['op']} | {shape} | {r['impl']} | {r['us']:.0f} | | |")


def passes(path):
    """Lines of `tapeline bench --json` and of the same shapes in transformers ("model")."""
    rows = [json.loads(line) for line in open(path)]
    print("| who | tokens | ms | tokens/s | peak GiB | gradients GiB | peak without gradients GiB |"
          "\n|---|---|---|---|---|---|---|")
    for r in rows:
        if "model" in r:
            way = " + torch.compile" if r["compile"] else ""
            gradients = r["params"] * 2 / 2**30  # in the weights' dtype
            print(f"| {r['model']}: transformers{way} | {r['B']} x {r['S']} | {r['ms']:.1f} | {r['tok_s']} "
                  f"| {r['peak_gib']:.1f} | {gradients:.1f} (bf16) | {r['peak_gib'] - gradients:.1f} |")
        elif "ms_all" in r:
            way = "" if "ms_without" not in r else f", offload ({r['ms_without']:.1f} ms without)"
            print(f"| {r['params'] / 1e9:.2f} G parameters: tapeline{way} | {r['batch']} x {r['seq']} | {r['ms']:.1f} "
                  f"| {r['tokens_per_s']:.0f} | {r['peak_gib']:.1f} | {r['gradient_gib']:.1f} (f32) "
                  f"| {r['peak_gib'] - r['gradient_gib']:.1f} |")
    for r in rows:
        if "trace" not in r:
            continue
        t = r["trace"]
        way = ", offload" if "ms_without" in r else ""
        print(f"\n{r['params'] / 1e9:.2f} G parameters, {r['batch']} x {r['seq']}{way}: {t['span_us'] / 1e3:.1f} ms from the first "
              f"to the last of {t['launches']} launches, in {t['busy_us'] / 1e3:.1f} of which the GPU works.\n\n"
              "| item | launches | ms |\n|---|---|---|")
        for x in t["largest"]:
            x["name"] = x["name"].replace("grouped_matmul_wgmma::Config<(GroupedMatmulPass)", "Config<pass ")
            name = x["name"] if len(x["name"]) <= 80 else x["name"][:77] + "..."
            print(f"| `{name}` | {x['calls']} | {x['us'] / 1e3:.1f} |")


{"training": training, "passes": passes, "benchmark": benchmark, "memory": memory,
 "kernels": kernels}[sys.argv[1]](sys.argv[2])
