#!/usr/bin/env python3
"""Measures three operations of PyTorch again and compares with a baseline file.

    python3 anchors.py BASELINE.jsonl [--bound=0.03]

Times of a baseline file are worth quoting beside today's only if the card still
gives them: a product in bf16 (bound by tensor cores), an RMS norm and a gather
of rows (bound by memory). Prints one JSON object per line: op, impl, shape, us,
us_min, baseline_us, ratio, verified (within the bound). Exit codes: 0, all
within the bound; 1, one is not; 2, no such file or rows, or no PyTorch; 3, no
GPU.
"""

import argparse
import json
import math
import statistics
import sys
import time

BURSTS = 9
BURST_MS = 20.0
PAUSE_S = 0.05  # the card's clock recovers


def gemm():
    def make(torch):
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
                for _ in range(2))
        return lambda: torch.mm(a, b)
    return "gemm", "cublas", {"m": 8192, "n": 8192, "k": 8192}, make, 2


def rms_norm():
    def make(torch):
        x = torch.randn(16384, 7168, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(7168, device="cuda", dtype=torch.bfloat16)
        return lambda: torch.nn.functional.rms_norm(x, (7168,), w, 1e-6)
    shape = {"T": 16384, "H": 7168}
    return "rmsnorm_fwd", "torch_F.rms_norm", shape, make, 2


def gather():
    def make(torch):
        x = torch.randn(8192, 7168, device="cuda", dtype=torch.bfloat16)
        rows = torch.randperm(65536, device="cuda") // 8
        return lambda: x.index_select(0, rows)
    shape = {"T": 8192, "H": 7168, "k": 8}
    return "permute_fwd", "torch_index_select", shape, make, 2


def measure(torch, launches):
    """Returns the median and the least time of a launch, in microseconds."""
    def burst(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)  # until all is queued
        begin.record()
        for i in range(count):
            launches[i % len(launches)]()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    burst(2 * len(launches))
    count = max(1, min(100, math.ceil(BURST_MS / burst(4))))
    times = []
    for _ in range(BURSTS):
        time.sleep(PAUSE_S)
        times.append(1e3 * burst(count))
    return statistics.median(times), min(times)


def find(rows, op, impl, shape):
    for row in rows:
        if row.get("op") == op and row.get("impl") == impl and row.get("us"):
            if row.get("shape", {}).items() >= shape.items():
                return row["us"]
    return None


def fail(message):
    print(message, file=sys.stderr)
    return 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("baseline")
    parser.add_argument("--bound", type=float, default=0.03)
    options = parser.parse_args()
    try:
        with open(options.baseline, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
    except OSError as error:
        return fail(f"{options.baseline}: {error.strerror}")
    except ValueError as error:
        return fail(f"{options.baseline}: {error}")
    if not all(isinstance(row, dict) for row in rows):
        return fail(f"{options.baseline}: a line is not a JSON object")
    anchors = [anchor() for anchor in (gemm, rms_norm, gather)]
    baseline = [find(rows, *anchor[:3]) for anchor in anchors]
    for (op, impl, *_), us in zip(anchors, baseline):
        if us is None:
            return fail(f"{options.baseline}: no row of {op} by {impl}")
    try:
        import torch  # pylint: disable=import-outside-toplevel
    except ImportError as error:
        return fail(f"no PyTorch: {error}")
    if not torch.cuda.is_available():
        print("no GPU", file=sys.stderr)
        return 3
    good = True
    for (op, impl, shape, make, sets), before in zip(anchors, baseline):
        us, least = measure(torch, [make(torch) for _ in range(sets)])
        near = abs(us / before - 1) <= options.bound
        good = good and near
        print(json.dumps({
            "schema": 1, "op": op, "impl": impl, "shape": shape,
            "us": round(us, 2), "us_min": round(least, 2),
            "baseline_us": before, "ratio": round(us / before, 4),
            "verified": near, "device": torch.cuda.get_device_name()}),
            flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
