#!/usr/bin/env python3
"""Writes muon.safetensors: Newton-Schulz iterations in f64 and SVDs, by numpy.

Per shape MxN: x (input), ns (five iterations of the quintic), and the input's
singular vectors u [M, r], vt [r, N]. The result shares them, so u^T ns vt^T is
diagonal with the result's singular values. The quintic has the local minimum
0.6818 and the local maximum 1.2023, between which every value ends.
"""
import json
import struct
import numpy as np

A, B, C = 3.4445, -4.7750, 2.0315
SHAPES = [(5, 9), (9, 5), (12, 12), (17, 33), (66, 11), (1, 6), (6, 1)]

rng = np.random.default_rng(2)
tensors = {}
for m, n in SHAPES:
    # A spread of singular values wide enough to be work, but not so wide that
    # five iterations leave some behind.
    u, _, vt = np.linalg.svd(rng.standard_normal((m, n)), full_matrices=False)
    x = u @ np.diag(np.linspace(0.15, 1, min(m, n))) @ vt * 3
    y = x / (np.linalg.norm(x) + 1e-7)
    if m > n:
        y = y.T
    for _ in range(5):
        s = y @ y.T
        y = A * y + (B * s + C * s @ s) @ y
    if m > n:
        y = y.T
    values = np.linalg.svd(y, compute_uv=False)
    print(m, n, values.min(), values.max())
    assert 0.6817 <= values.min() and values.max() <= 1.2024
    for name, t in (("x", x), ("ns", y), ("u", u), ("vt", vt)):
        tensors[f"{m}x{n}.{name}"] = np.ascontiguousarray(t)

head, at = {}, 0
for name, x in tensors.items():
    head[name] = {"dtype": "F64", "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
    at += x.nbytes
text = json.dumps(head).encode()
text += b" " * (-len(text) % 8)
with open("muon.safetensors", "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text)
    for x in tensors.values():
        f.write(x.tobytes())
