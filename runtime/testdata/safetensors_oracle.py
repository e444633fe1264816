#!/usr/bin/env python3
"""A second reader and writer of safetensors, from the format's description and
the standard library alone.

  safetensors_oracle.py make FILE     writes FILE
  safetensors_oracle.py check FILE    fails unless FILE holds what make wrote
"""
import json
import struct
import sys

BITS = {"F32": 32, "BF16": 16, "F64": 64, "I32": 32, "I64": 64, "U8": 8}


def bf16(values):
    """Values that bf16 holds exactly."""
    return b"".join(struct.pack("<f", v)[2:] for v in values)


TENSORS = {
    "model.norm.weight": ("BF16", [2, 2], bf16([1.0, -0.5, 3.0, 2.0 ** 20])),
    "model.layers.0.w": ("F32", [2, 1, 3], struct.pack("<6f", *range(-3, 3))),
    "counts": ("I32", [3], struct.pack("<3i", -1, 0, 2 ** 31 - 1)),
    "steps": ("I64", [], struct.pack("<q", 2 ** 40)),
    "exact": ("F64", [1], struct.pack("<d", 0.1)),
    "bytes": ("U8", [5], bytes([0, 1, 2, 254, 255])),
    "empty": ("F32", [0, 7], b""),
    "n\u00e4me \"quoted\"\\": ("U8", [1], b"x"),
}
METADATA = {"format": "pt", "note": "line\nbreak"}


def make(path):
    header = {}
    data = b""
    for name, (dtype, shape, raw) in TENSORS.items():
        end = len(data) + len(raw)
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), end],
        }
        data += raw
    # Where it stands is free.
    header["__metadata__"] = METADATA
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def check(path):
    with open(path, "rb") as file:
        content = file.read()
    (length,) = struct.unpack("<Q", content[:8])
    assert (8 + length) % 8 == 0, "data is not aligned to 8 bytes"
    header = json.loads(content[8:8 + length].decode())
    data = content[8 + length:]
    assert header.pop("__metadata__") == METADATA
    assert set(header) == set(TENSORS), set(header) ^ set(TENSORS)
    at = 0
    for name, info in sorted(header.items(),
                             key=lambda item: item[1]["data_offsets"]):
        assert set(info) == {"dtype", "shape", "data_offsets"}
        begin, end = info["data_offsets"]
        assert begin == at, f"{name} begins at {begin}, not at {at}"
        at = end
        dtype, shape, raw = TENSORS[name]
        assert (info["dtype"], info["shape"]) == (dtype, shape), name
        assert data[begin:end] == raw, name
        assert begin % (BITS[dtype] // 8) == 0, f"{name} is not aligned"
    assert at == len(data), "bytes after the last tensor"


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]](sys.argv[2])
