#!/usr/bin/env python3
"""Tables of this folder's pages, from the raw JSON beside them.

    python3 tools/results/tables.py training FILE.jsonl    # a run's metrics
    python3 tools/results/tables.py benchmark FILE.json    # Google Benchmark
    python3 tools/results/tables.py memory FILE.jsonl      # memory.sh
    python3 tools/results/tables.py passes FILE.jsonl      # tapeline bench
    python3 tools/results/tables.py pipeline FILE.jsonl    # stages, messages, runs
    python3 tools/results/tables.py sanitizers FILE.jsonl  # compute-sanitizer
    python3 tools/results/tables.py misses FILE.jsonl      # what has to be profiled
    python3 tools/results/tables.py kernels FILE.jsonl [PROFILES.jsonl]

`kernels` prints a whole page, of rows of `bench --json --baseline=..` and, if
they are there, of tools/gpu/anchors.py; and of what bounds each row that misses
its goal, of lines of `tools/profile --json`:

    python3 tools/results/tables.py misses FILE.jsonl |
      while read op shape; do tools/profile --json $op $shape; done > PROFILES.jsonl
"""
import json
import os
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


# What each op of `bench` has to reach: a share of the copy or the product that
# was measured in the same run, microseconds at most, or times as fast as the
# baseline.
MEMORY_BOUND = ("of copy", 0.85)
GOALS = {
    **dict.fromkeys(
        ["permute_fwd", "permute_bwd", "combine_fwd", "combine_bwd", "swiglu_fwd", "swiglu_bwd", "rmsnorm_fwd",
         "rmsnorm_bwd", "layernorm_fwd", "layernorm_bwd", "rope_fwd", "rope_bwd", "embedding_fwd", "embedding_bwd",
         "add", "cast", "add_rmsnorm_fwd", "cross_entropy_fwdbwd", "adamw", "clip_grad_norm", "ce_fwd", "ce_bwd"],
        MEMORY_BOUND),
    "grouped_fwd": ("of GEMM", 0.65), "grouped_dgrad": ("of GEMM", 0.65),
    "grouped_wgrad": ("of GEMM", 0.60),
    "dsa_indexer_scores": ("of GEMM", 0.30), "dsa_topk": ("x baseline", 3.0),
    "sparse_mla_fwd": ("of GEMM", 0.25), "sparse_mla_bwd": ("of GEMM", 0.12),
    "linear_ce_fwdbwd": ("of GEMM", 0.65),
    "sdpa_causal_fwd": ("of GEMM", 0.40), "sdpa_causal_bwd": ("of GEMM", 0.28),
    "router_topk": ("us at most", 40.0), "route_sort_index": ("us at most", 25.0),
    "moe_ffn_fwdbwd": ("x baseline", 1.0),
}


def judge(row):
    """Goal, what was reached, and whether it misses; None without a goal or a measurement of it."""
    kind, bound = GOALS.get(row["op"], (None, None))
    if kind is None:
        return "", "", None
    if kind == "x baseline" and row["x_baseline"] is None:
        return f"{bound:g} {kind}", "no baseline", None
    if kind == "us at most":
        return f"{bound:g} {kind}", f"{row['us']:.1f}", row["us"] > bound
    value = (row["x_baseline"] if kind == "x baseline" else
             row["gbps"] / row["ceiling_gbps"] if kind == "of copy" else row["tflops"] / row["ceiling_tflops"])
    return f"{bound:g} {kind}", f"{value:.2f}", value < bound


def misses(path):
    for row in map(json.loads, open(path)):
        if row["impl"] == "tapeline" and judge(row)[2]:
            print(row["op"], "x".join(str(n) for n in row["shape"].values()))


# What a warp waits for, in words.
STALLS = {
    "long_scoreboard": "memory", "short_scoreboard": "shared memory or special functions", "barrier": "its block",
    "membar": "a fence", "math_pipe_throttle": "arithmetic units", "mio_throttle": "the queue to shared memory",
    "lg_throttle": "the queue to memory", "wait": "an instruction of its own", "no_instruction": "instructions",
    "drain": "its stores", "gmma": "tensor cores", "branch_resolving": "a branch", "dispatch_stall": "dispatch",
}


# What no profile says.
NOTES = {"layernorm_bwd": "a kernel more adds the blocks' sums of dw and db"}


def why(row, profiles):
    """A sentence for a row that misses: what its kernels' profiles show, the longest first."""
    shape = "x".join(str(n) for n in row["shape"].values())
    kernels = sorted((p for p in profiles if (p["op"], p["shape"]) == (row["op"], shape)),
                     key=lambda p: p["us"] or 0, reverse=True)
    note = []
    moved = row["gbps"] * row["us"] * 1e3  # bytes
    for p in profiles:
        if p["op"] == "copy" and abs(int(p["shape"]) / moved - 1) < 0.01:
            most = int(p["shape"]) / p["us"] / 1e3 / row["ceiling_gbps"]
            note.append(f"a copy of as many bytes takes {p['us']:.1f} us (line `copy` of the profiles), so {most:.2f} is the most")
    note += [NOTES[row["op"]]] if row["op"] in NOTES else []

    def one(p):
        wait = STALLS.get(p["stall"], p["stall"])
        return (f"`{p['kernel'].split('<')[0]}` {p['us']:.1f} us alone: DRAM "
                f"{p['dram_pct']:.0f} %, L2 {p['l2_pct']:.0f} %, processors {p['sm_pct']:.0f} %, warps "
                f"{p['occupancy_pct']:.0f} %, which wait most for {wait} ({p['stall_pct']:.0f} %)")

    return "; ".join(note + [one(p) for p in kernels]) or "not profiled"


def kernels(path, profile_path=None):
    rows = [json.loads(line) for line in open(path)]
    profiles = [json.loads(line) for line in open(profile_path)] if profile_path else []
    ours = [r for r in rows if r["impl"] == "tapeline"]
    others = [r for r in rows if r["impl"] != "tapeline"]
    anchors = [r for r in others if "baseline_us" in r]
    baselines = [r for r in others if "of" in r]  # lines of torch's, and the run that they are of
    measured = [r for r in baselines if r["of"] == "this run"]
    if not ours:
        sys.exit(f"{path}: no row of tapeline's")
    absent = sorted(set(GOALS) - {r["op"] for r in ours})
    first = ours[0]
    for r in ours:
        same = [b for b in baselines if b["op"] == r["op"] and all(
            b["shape"].get(key, value) == value for key, value in r["shape"].items())]
        if same and r["baseline_us"] is None:
            best = min(same, key=lambda b: b["us"])
            r.update(baseline_impl=best["impl"], baseline_us=best["us"], x_baseline=best["us"] / r["us"])

    def shape(row):
        return " ".join(f"{key}={value}" for key, value in row["shape"].items())

    def only(key):
        return ", ".join(sorted({str(r[key]) for r in ours}))

    print(f"# Kernels alone, one {only('device')}")
    print(f"\nFrom `{path.split('/')[-1]}` by `python3 tools/results/tables.py kernels`. Driver {only('driver')}, device "
          f"{only('device_uuid')}, commit {only('commit')}; command: `{only('command')}`.")
    squares = [r["ceiling_tflops"] for r in ours if r.get("ceiling_tflops")]
    print(f"Ceilings of the same run: copy {first['ceiling_gbps']:.0f} GB/s, a bf16 product of 8192^3 by cuBLASLt "
          f"{min(squares):.0f} TFLOP/s; grouped products are held against the faster of that and one product of their "
          f"size (up to {max(squares):.0f}). Times are medians of seven bursts, each after a pause that lets the card's clock recover; `of ceiling` is the time that work and "
          "bytes would take at the ceilings over the time it took. Sampled rows of every timed launch were compared "
          f"with a plain loop in f64: {sum(r['verified'] for r in ours)} of {len(ours)} agree.")
    missing = [r for r in ours if judge(r)[2]]
    judged = [r for r in ours if judge(r)[2] is not None]
    print(f"\n{len(judged) - len(missing)} of {len(judged)} rows with a goal reach it."
          + (" Misses: " + ", ".join(f"{r['op']} ({shape(r)})" for r in missing) + "." if missing else "")
          + (" No row at all: " + ", ".join(absent) + "." if absent else ""))
    print("\n| op | shape | us | TFLOP/s | GB/s | of ceiling | x baseline | goal | reached | misses |"
          "\n|---|---|---|---|---|---|---|---|---|---|")
    for r in ours:
        goal, reached, miss = judge(r)
        rate = f"{r['tflops']:.0f}" if r["tflops"] >= 1 else ""
        # A link has no ceiling here; a composed op states no bytes.
        gbps = f"{r['gbps']:.0f}" if r["gbps"] else ""
        share = f"{r['pct_ceiling'] / 100:.2f}" if r.get("pct_ceiling") else ""
        base = f"{r['x_baseline']:.2f} ({r['baseline_impl']})" if r.get("x_baseline") else ""
        wrong = "" if r["verified"] else " **wrong**"
        print(f"| {r['op']}{wrong} | {shape(r)} | {r['us']:.1f} | {rate} | {gbps} | {share} | {base} | {goal} "
              f"| {reached} | {'misses' if miss else ''} |")
    if missing and profile_path:
        how = (f", by Nsight Compute on one warmed launch with cold caches, at the base clock "
               f"(`{os.path.basename(profile_path)}` by `tools/profile --json`)")
        print(f"\nWhat bounds each miss{how}:\n")
        for r in missing:
            print(f"- {r['op']} ({shape(r)}): {why(r, profiles)}.")
    if measured:
        print("\nBaselines that were measured in the same run: "
              + ", ".join(f"{r['op']} by {r['impl']} ({shape(r)}) {r['us']:.1f} us"
                          + (f" (the fastest {r['us_min']:.1f})" if r["us"] > 1.03 * r["us_min"] else "") for r in measured) + ".")
    if anchors:
        print(f"\nThe {'other baselines' if measured else 'baselines'} are of another day; three of them, measured again beside these:"
              "\n\n| op | by | shape | us | then | ratio | within 3 % |\n|---|---|---|---|---|---|---|")
        for r in anchors:
            print(f"| {r['op']} | {r['impl']} | {shape(r)} | {r['us']:.1f} | {r['baseline_us']:.1f} "
                  f"| {r['ratio']:.3f} | {'yes' if r['verified'] else 'no'} |")


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
        if "provenance" in r:
            p = r["provenance"]
            print(f"\n- `{' '.join(p['command_line'])}`, commit {p['commit']}, {p['device_uuid']}: "
                  f"{len(r['ms_all'])} passes of {min(r['ms_all']):.1f} to {max(r['ms_all']):.1f} ms")
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
    if any("copies" in r for r in rows):
        offload_and_steps(rows)


def offload_and_steps(rows):
    """Of the same file: copies of windows, the link, what was planned, and what steady steps ask of CUDA."""
    link = {r["op"]: r["gbps"] for r in rows if r.get("op") in ("d2h_pinned", "h2d_pinned")}
    print("\n| copies of windows of 4 MiB and more | bytes | how many | GB/s | of the link |\n|---|---|---|---|---|")
    for r in rows:
        if "copies" in r:
            of = link["d2h_pinned" if r["copies"] == "copy to host" else "h2d_pinned"]
            print(f"| {r['copies']} | {r['bytes']} | {r['count']} | {r['gbps_min']:.1f} to {r['gbps_max']:.1f} | {r['gbps_min'] / of:.3f} and more |")
    print(f"\nA pinned copy of 100 MiB alone: {link['d2h_pinned']:.1f} GB/s to the host, {link['h2d_pinned']:.1f} back.")
    for r in rows:
        if "planned" in r:
            print(f"\n`{' '.join(r['command_line'])}` at {r['commit']}:\n\n| | planned | in each of {r['steps']} steps |\n|---|---|---|")
            for key, name in (("offload_bytes", "bytes to the host"), ("peak_bytes", "peak of the pool, bytes")):
                print(f"| {name} | {r['planned'][key]} | {r['measured'][key]} |")
            for w in r["planned"]["windows"]:
                to = f"{w['bytes']} bytes, copied" if w["copied"] else "stays"
                what = " and ".join(key for key in ("activations", "ids") if w[key])
                print(f"| window of layer {w['layer']}, {what} | {to} | |")
            exposed = ", ".join(f"{x:.1f}" for x in r["offload_exposed_ms"])
            print(f"\nWaiting for copies, ms of each step: {exposed}, of " + ", ".join(f"{x:.0f}" for x in r["step_ms"]) + ".")
    print("\n| steps 5 to 10 of | commit | synchronizations | allocations | frees | pageable copies | events and streams created "
          "| launches | copies | replays, bytes to the host a step |\n|---|---|---|---|---|---|---|---|---|---|")
    for r in rows:
        if "cuda" in r and "commit" in r:
            c = r["cuda"]
            print(f"| {r['config']} | {r['commit']} | {c['synchronizations']} | {c['allocations']} | {c['frees']} | {c['pageable_copies']} "
                  f"| {c['creations']} | {c['launches']} | {c['copies']} | {r['replays']}, {r['offload_bytes']} |")


def sanitizers(path):
    """Lines of runs; "all_tests" are what there is to run, and "passed_tests" name what passed: suite -> cases."""
    rows = [json.loads(line) for line in open(path)]
    print("| tool | commit | what | tests | passed | failed | not reached | reports |\n|---|---|---|---|---|---|---|---|")
    for r in rows:
        if "commit" in r and "tests" in r:
            print(f"| {r['tool']} | {r['commit']} | {r['what']} | {r['tests']} | {r['passed']} | {r['failed']} "
                  f"| {r['tests'] - r['passed'] - r['failed']} | {r.get('reports', '')} |")

    def names(tests):
        return {f"{suite}.{case}" for suite, cases in tests.items() for case in cases}

    there = set().union(*(names(r["all_tests"]) for r in rows if "all_tests" in r))
    passed = set().union(*(names(r["passed_tests"]) for r in rows if r["tool"] == "racecheck" and "passed_tests" in r))
    left = sorted(there - passed)
    print(f"\nOf {len(there)} tests {len(there) - len(left)} have passed under racecheck with the instructions that their kernels have now."
          + (f" The {len(left)} others:\n" if left else ""))
    suites = {}
    for name in left:
        suite, _, case = name.partition(".")
        suites.setdefault(suite, []).append(case)
    for suite, cases in suites.items():
        print(f"- {suite}: {', '.join(cases)}")


def pipeline(path):
    """Lines {"stages": bench --stages}, {"messages": bench --messages}, {"simulated": schedule --stage_cost} and
    {"run", "model", "schedule", "micro_batches", "row": a step of metrics.jsonl}; schedule "one": one GPU, plain loop;
    "layout" where it is not the even one; "timed" false: others used the GPUs as well."""
    lines = [json.loads(line) for line in open(path)]
    rows, simulated, untimed = {}, {}, set()

    def labelled(schedule, x):
        return schedule + (f" `{x['layout']}`".replace("|", "\\|") if "layout" in x else "")

    for x in lines:
        if "run" in x:
            key = x["model"], x["micro_batches"], labelled(x["schedule"], x)
            rows.setdefault(key, []).append(x["row"])
            if not x.get("timed", True):
                untimed.add(key)
        elif "simulated" in x:
            s = x["simulated"]
            simulated[s["model"], s["micro_batches"], labelled(s["name"], s)] = s

    def median(values):
        return sorted(values)[len(values) // 2]

    print("Milliseconds of a micro-batch, each stage alone on one GPU:\n\n| model | stages | stage | F | I | W | B |"
          "\n|---|---|---|---|---|---|---|")
    for x in (x for x in lines if "stages" in x):
        for s, of in enumerate(x["stages"]["stages"]):
            print(f"| {x['model']} | `{x['stages']['layout'].replace('|', chr(92) + '|')}` | {s} | "
                  + " | ".join(f"{of[p]:.2f}" for p in "FIWB") + " |")
    print("\nMessages, one way, of ten round trips:\n\n| model | message | MiB | ms | GB/s |\n|---|---|---|---|---|")
    for x in (x for x in lines if "messages" in x):
        for m in x["messages"]["messages"]:
            print(f"| {x['model']} | {m['what']} | {m['bytes'] / 2**20:.1f} | {m['ms']:.3f} | {m['gb_per_s']:.0f} |")
    print("\nThe same numbers in every step as one GPU has them:\n\n| model | micro-batches | schedule | steps | losses "
          "and norm | hashes of gradients and parameters |\n|---|---|---|---|---|---|")
    for (model, m, schedule), of in rows.items():
        one = rows.get((model, m, "one"))
        if schedule == "one" or one is None:
            continue
        equal, hashed, same = len(of) == len(one), 0, True
        for a, b in zip(of, one):
            equal = equal and all(a[k] == b[k] for k in a if k.endswith("loss") or k == "grad_norm")
            if "grad_hash" in a:
                hashed += 1
                same = same and a["grad_hash"] == b["grad_hash"] and a["param_hash"] == b["param_hash"]
        print(f"| {model} | {m} | {schedule} | {len(of)} | {'equal' if equal else '**differ**'} | "
              f"{'' if not hashed else f'{hashed} equal' if same else '**differ**'} |")
    print("\nTimes of a step, medians without the first one. `measured`: from its begin to the end of its last pass; `simulated`: "
          "of the parts above; peak memory of the pool on each rank:\n\n| model | micro-batches | schedule | measured ms | simulated ms "
          "| ratio | bubble % | simulated % | messages exposed ms | step ms | tokens/s | x one GPU | peak GiB |"
          "\n|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for (model, m, schedule), of in rows.items():
        if (model, m, schedule) in untimed:
            continue
        later = [r for r in of[1:] if "grad_hash" not in r]
        step = median([r["step_ms"] for r in later])
        rate = median([r["tokens_per_s"] for r in later])
        if schedule == "one":
            print(f"| {model} | {m} | one GPU | | | | | | | {step:.1f} | {rate:.0f} | 1 | "
                  f"{later[-1]['pool_peak_bytes'] / 2**30:.1f} |")
            continue
        measured = median([r["pipeline_ms"] for r in later])
        bubble = 100 * median([r["bubble_measured"] for r in later])
        s = simulated.get((model, m, schedule))
        one = rows.get((model, m, "one"))
        times = "" if one is None else f"{median([r['step_ms'] for r in one[1:] if 'grad_hash' not in r]) / step:.2f}"
        print(f"| {model} | {m} | {schedule} | {measured:.1f} | "
              + (f"{s['makespan']:.1f} | {measured / s['makespan']:.3f} | {bubble:.1f} | {100 * s['bubble']:.1f}" if s else
                 f" | | {bubble:.1f} | ")
              + f" | {median([r['messages_exposed_ms'] or 0 for r in later]):.1f} | {step:.1f} | {rate:.0f} | {times} | "
              + " ".join(f"{b / 2**30:.1f}" for b in later[-1]["rank_peak_bytes"]) + " |")


KINDS = {"training": training, "pipeline": pipeline, "passes": passes, "benchmark": benchmark, "memory": memory,
         "kernels": kernels, "misses": misses, "sanitizers": sanitizers}


def main():
    if len(sys.argv) < 3 or sys.argv[1] not in KINDS:
        sys.exit("usage: tables.py KIND FILE [PROFILES], KIND one of " + ", ".join(KINDS))
    try:
        for path in sys.argv[2:]:
            text = open(path).read().strip()
            if not text:
                sys.exit(f"{path}: is empty")
            for line in [text] if sys.argv[1] == "benchmark" else text.splitlines():
                json.loads(line)
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}")
    except json.JSONDecodeError as error:
        sys.exit(f"{path}: is no JSON, or was cut off: {error}")
    KINDS[sys.argv[1]](*sys.argv[2:])


main()
