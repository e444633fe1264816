#!/usr/bin/env python3
"""Writes optimizer.json: what AdamW and Muon make of given gradients.

Plain Python in double precision, from the papers' formulas: AdamW (Loshchilov
and Hutter 2019, algorithm 2), Muon (Jordan et al. 2024) with the update scale
of arXiv 2502.16982, and torch's clip_grad_norm_. Inputs are multiples of 1/64,
exact in every float dtype.

    python3 make_optimizer.py > optimizer.json
"""

import json
import math

BETA1, BETA2, EPS, DECAY = 0.9, 0.95, 1e-8, 0.1
MOMENTUM, MUON_STEPS = 0.95, 5
MAX_NORM = 1.0
RATES = [1e-3, 2e-3, 1.5e-3]

# name, shape, Muon row blocks (None: AdamW)
TENSORS = [
    ("bias", [3], None),
    ("embed", [4, 3], None),
    ("heads", [10, 4], [[0, 3], [3, 5], [5, 8], [8, 10]]),
    ("tall", [7, 2], [[0, 7]]),
    ("unused", [2, 3], [[0, 2]]),
]


class Grid:
    """A small linear congruential generator of multiples of 1/64 in [-1, 1)."""

    def __init__(self, seed):
        self.state = seed

    def draw(self, n):
        out = []
        for _ in range(n):
            self.state = (1664525 * self.state + 1013904223) % 2**32
            out.append(((self.state >> 25) - 64) / 64)
        return out


def matmul(a, b):
    return [[sum(x * b[k][j] for k, x in enumerate(row))
             for j in range(len(b[0]))] for row in a]


def transpose(a):
    return [list(column) for column in zip(*a)]


def combine(p, a, q, b):
    return [[p * x + q * y for x, y in zip(r, s)] for r, s in zip(a, b)]


def newton_schulz(g, steps):
    tall = len(g) > len(g[0])
    x = transpose(g) if tall else g
    norm = math.sqrt(sum(v * v for row in x for v in row)) + 1e-7
    x = [[v / norm for v in row] for row in x]
    for _ in range(steps):
        a = matmul(x, transpose(x))
        b = combine(-4.7750, a, 2.0315, matmul(a, a))
        x = combine(3.4445, x, 1.0, matmul(b, x))
    return transpose(x) if tall else x


def size(shape):
    return math.prod(shape)


def adamw(t, w, g, m, v, lr, step, decays):
    for i in range(len(w)):
        m[i] = BETA1 * m[i] + (1 - BETA1) * g[i]
        v[i] = BETA2 * v[i] + (1 - BETA2) * g[i] * g[i]
        m_hat = m[i] / (1 - BETA1**step)
        v_hat = v[i] / (1 - BETA2**step)
        if decays:
            w[i] -= lr * DECAY * w[i]
        w[i] -= lr * m_hat / (math.sqrt(v_hat) + EPS)


def muon(shape, blocks, w, g, momentum, lr):
    columns = shape[1]
    for i in range(len(w)):
        momentum[i] = MOMENTUM * momentum[i] + (1 - MOMENTUM) * g[i]
    for begin, end in blocks:
        update = [[(1 - MOMENTUM) * g[r * columns + c] +
                   MOMENTUM * momentum[r * columns + c]
                   for c in range(columns)] for r in range(begin, end)]
        o = newton_schulz(update, MUON_STEPS)
        scale = 0.2 * math.sqrt(max(end - begin, columns))
        for r in range(begin, end):
            for c in range(columns):
                i = r * columns + c
                w[i] = (1 - lr * DECAY) * w[i] - lr * scale * o[r - begin][c]


def run(kind):
    grid = Grid(20)
    start = {name: grid.draw(size(shape)) for name, shape, _ in TENSORS}
    values = {name: list(w) for name, w in start.items()}
    first = {name: [0.0] * size(shape) for name, shape, _ in TENSORS}
    second = {name: [0.0] * size(shape) for name, shape, _ in TENSORS}
    steps = []
    for k, lr in enumerate(RATES):
        # "unused" is reached by the first step alone. The last step is too
        # small to be clipped.
        factor = 1 / 16 if k == 2 else 1.0
        grads = {name: [factor * x for x in grid.draw(size(shape))]
                 for name, shape, _ in TENSORS}
        if k > 0:
            grads["unused"] = [0.0] * size([2, 3])
        norm = math.sqrt(sum(x * x for g in grads.values() for x in g))
        clip = min(1.0, MAX_NORM / (norm + 1e-6))
        for name, shape, blocks in TENSORS:
            g = [clip * x for x in grads[name]]
            if kind == "muon" and blocks is not None:
                muon(shape, blocks, values[name], g, first[name], lr)
            else:
                adamw(name, values[name], g, first[name], second[name], lr,
                      k + 1, len(shape) > 1)
        steps.append({"lr": lr, "grads": grads, "norm": norm, "clip": clip,
                      "values": {n: list(w) for n, w in values.items()}})
    return {"kind": kind, "start": start, "steps": steps}


def main():
    print(json.dumps({"tensors": [[name, shape] for name, shape, _ in TENSORS],
                      "runs": [run("adamw"), run("muon")]}))


if __name__ == "__main__":
    main()
