#!/usr/bin/env python3
"""What bounds each kernel of a launch, from the raw page of Nsight Compute.

    profile_summary.py OP SHAPE PAGE.csv

Prints a JSON object a kernel, in the order they ran: microseconds, bytes read
and written in DRAM, how much of the peak of DRAM, L2 and processors was used,
how full of warps the processors were, and what warps waited for the most (the
share of all the cycles that resident warps spent). tools/profile --json calls it.
"""
import csv
import json
import re
import sys

STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
# Two of the states are no waiting.
NO_STALL = ("selected", "not_selected")


def kernel_name(text):
    """Without a return type, unnamed namespaces and parameters: swiglu_forward_kernel<true, bf16>."""
    text = re.sub(r"<?unnamed>::|\(anonymous namespace\)::|^void ", "", text)
    # Parameters begin at a parenthesis that is no cast in a template's arguments.
    depth = 0
    for at, c in enumerate(text):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            return text[:at]
    return text


def number(text):
    text = text.replace(",", "")
    return float(text) if text not in ("", "n/a") else None


def summary(op, shape, row):
    def metric(*names):
        for name in names:
            if name in row and number(row[name]) is not None:
                return number(row[name])
        return None

    def rounded(value, digits=1, factor=1.0):
        return None if value is None else round(value * factor, digits)

    states = {m[1]: number(row[key]) or 0 for key in row if (m := STALL.fullmatch(key)) and not m[1].endswith("not_issued")}
    waits = {name: value for name, value in states.items() if name not in NO_STALL}
    top = max(waits, key=waits.get) if waits else None
    return {
        "op": op, "shape": shape,
        "kernel": kernel_name(row["Kernel Name"]),
        "grid": row.get("Grid Size"), "block": row.get("Block Size"),
        "registers": rounded(metric("launch__registers_per_thread"), 0),
        "us": rounded(metric("gpu__time_duration.sum", "gpu__time_duration.avg"), 1, 1e-3),
        "dram_mb": rounded(metric("dram__bytes.sum"), 1, 1e-6)
        or rounded((metric("dram__bytes_read.sum") or 0) + (metric("dram__bytes_write.sum") or 0), 1, 1e-6),
        "dram_pct": rounded(metric("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
                                   "dram__throughput.avg.pct_of_peak_sustained_elapsed")),
        "l2_pct": rounded(metric("lts__throughput.avg.pct_of_peak_sustained_elapsed")),
        "sm_pct": rounded(metric("sm__throughput.avg.pct_of_peak_sustained_elapsed")),
        "occupancy_pct": rounded(metric("sm__warps_active.avg.pct_of_peak_sustained_active")),
        "stall": top,
        "stall_pct": rounded(100 * waits[top] / sum(states.values())) if top and sum(states.values()) else None,
    }


def main():
    if len(sys.argv) != 4:
        print("usage:", __doc__.split("\n\n")[1].strip(), file=sys.stderr)
        sys.exit(64)
    op, shape, path = sys.argv[1:]
    # Lines of ncu's own begin with ==; then come names, units and rows.
    lines = [line for line in open(path, newline="") if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    if len(rows) < 2:
        sys.exit(f"profile: {path} has no kernel: {open(path).read().strip()[-300:]}")
    for row in rows[1:]:
        print(json.dumps(summary(op, shape, row)))


if __name__ == "__main__":
    main()
