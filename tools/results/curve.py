#!/usr/bin/env python3
"""A learning curve as SVG, from a run's metrics.jsonl.

    python3 tools/results/curve.py FILE.jsonl >curve.svg

Bits per byte over minutes of training: a line for the training loss, each point
a mean over steps, and a dot for each evaluation of the validation split.
"""
import json
import math
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 56, 24, 24, 48
LOW, HIGH = 1.0, 5.0  # bits per byte that are shown


def main(path):
    rows = [json.loads(line) for line in open(path)]
    steps = [r for r in rows if "step_ms" in r]
    start = steps[0]["time_unix"] - steps[0]["step_ms"] / 1e3
    minutes = {r["step"]: (r["time_unix"] - start) / 60 for r in steps}
    evals = [(minutes[r["step"]], r["val_bits_per_byte"], r["step"]) for r in rows if "val_bits_per_byte" in r]
    group = max(1, len(steps) // 200)
    train = []
    for i in range(0, len(steps) - group + 1, group):
        part = steps[i:i + group]
        train.append((minutes[part[-1]["step"]], sum(r["lm_loss"] for r in part) / group / math.log(2)))
    end = max(minutes.values())

    def x(t):
        return LEFT + t / end * (WIDTH - LEFT - RIGHT)

    def y(v):
        v = min(max(v, LOW), HIGH)
        return HEIGHT - BOTTOM - (v - LOW) / (HIGH - LOW) * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    ]
    for tick in range(int(LOW * 2), int(HIGH * 2) + 1):
        v = tick / 2
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{v:.1f}</text>')
    for minute in range(int(end) + 1):
        out.append(f'<text x="{x(minute):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{minute}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">minutes of training</text>')
    out.append(f'<text x="{LEFT}" y="{TOP - 8}">bits per byte: training (line), validation (dots, last '
               f'{evals[-1][1]:.3f} after {evals[-1][2]} steps)</text>')
    points = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in train)
    out.append(f'<polyline points="{points}" fill="none" stroke="#3b6ea5"/>')
    for t, v, _ in evals:
        out.append(f'<circle cx="{x(t):.1f}" cy="{y(v):.1f}" r="3.5" fill="#c0392b"/>')
    out.append("</svg>")
    print("\n".join(out))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
