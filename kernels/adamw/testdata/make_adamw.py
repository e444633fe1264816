#!/usr/bin/env python3
"""Writes adamw.safetensors: four AdamW steps in f64, by numpy.

Follows algorithm 2 of arXiv 1711.05101 as its text has it, with bias-corrected
moments as arrays of their own.
"""
import json
import struct
import numpy as np

LR, BETA1, BETA2, EPS, DECAY, CLIP = 3e-3, 0.9, 0.95, 1e-8, 0.1, 0.7
STEPS, N = 4, 53

rng = np.random.default_rng(1)
param = rng.standard_normal(N)
grads = rng.standard_normal((STEPS, N)) * np.logspace(-6, 2, N)
grads[:, 7] = 0  # decays all the same
grads[1:, 11] = 0  # only its moments are left

tensors = {"param": param.copy(), "grads": grads}
first = np.zeros(N)
second = np.zeros(N)
for t in range(1, STEPS + 1):
    g = CLIP * grads[t - 1]
    first = BETA1 * first + (1 - BETA1) * g
    second = BETA2 * second + (1 - BETA2) * g * g
    first_hat = first / (1 - BETA1**t)
    second_hat = second / (1 - BETA2**t)
    param = param - LR * (first_hat / (np.sqrt(second_hat) + EPS) + DECAY * param)
    tensors[f"param.{t}"] = param
    tensors[f"m.{t}"] = first
    tensors[f"v.{t}"] = second

head, at = {}, 0
for name, x in tensors.items():
    head[name] = {"dtype": "F64", "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
    at += x.nbytes
text = json.dumps(head).encode()
text += b" " * (-len(text) % 8)
with open("adamw.safetensors", "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text)
    for x in tensors.values():
        f.write(np.ascontiguousarray(x).tobytes())
