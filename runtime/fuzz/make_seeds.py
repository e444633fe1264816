#!/usr/bin/env python3
"""Writes the first inputs of each corpus: valid files, and one of each kind of
damage that parsers of these formats are known to fall for."""
import json
import os
import struct

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "corpus")


def put(folder, name, data):
    path = os.path.join(HERE, folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())


def tensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def info(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


put("safetensors", "empty", tensors({}))
put("safetensors", "two", tensors(
    {"a": info("F32", [2], 0, 8), "b": info("BF16", [1, 2], 8, 12),
     "__metadata__": {"format": "pt"}}, bytes(12)))
put("safetensors", "sub_byte", tensors({"a": info("F4", [4], 0, 2)}, bytes(2)))
put("safetensors", "zero_extent", tensors({"a": info("U8", [0, 9], 0, 0)}))
put("safetensors", "hole", tensors({"a": info("U8", [1], 1, 2)}, bytes(2)))
put("safetensors", "overlap", tensors(
    {"a": info("U8", [2], 0, 2), "b": info("U8", [2], 1, 3)}, bytes(3)))
put("safetensors", "product_wraps", tensors(
    {"a": info("F32", [2 ** 63 - 1, 2 ** 63 - 1, 0], 0, 0)}))
put("safetensors", "length_wraps", struct.pack("<Q", 2 ** 64 - 5) + b"{}")
put("safetensors", "twice", tensors(
    b'{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},'
    b'"a":{"dtype":"U8","shape":[],"data_offsets":[1,2]}}', bytes(2)))
put("safetensors", "double_offset", tensors(
    b'{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1e0]}}', bytes(1)))
put("safetensors", "nul", tensors(b"{}\0", b""))

put("safetensors_index", "two", json.dumps(
    {"metadata": {"total_size": 12},
     "weight_map": {"a": "model-00001-of-00002.safetensors",
                    "b": "model-00002-of-00002.safetensors"}}))
put("safetensors_index", "parent", json.dumps(
    {"weight_map": {"a": "../x.safetensors"}}))
put("safetensors_index", "no_metadata", '{"weight_map":{}}')

put("json", "config", json.dumps(
    {"model_type": "glm_moe_dsa", "eps": 1e-5, "n": 2 ** 53 + 1,
     "list": [1, -0.0, None, True], "o": {"k": "\u00e4\U0001f600\n"}}, indent=2))
put("json", "big_integer", str(2 ** 64))
put("json", "big_double", "1e400")
put("json", "small_double", "[4.9e-324, 1e-400, -0]")
put("json", "surrogate", '"\\ud800"')
put("json", "deep", "[" * 70 + "]" * 70)
put("json", "twice", '{"a":1,"a":2}')
put("json", "nul", b"1\0")
put("json", "bom", b"\xef\xbb\xbf1")

put("toml", "config", 'seed = 1\n[a.b]\nc = [1, 2.5, "x", {d = true}]\n'
    '[[t]]\nx = inf\n"q k".\'r\' = nan\ns = """\nmany\nlines"""\n')
put("toml", "date", "a = 1979-05-27T07:32:00Z\n")
put("toml", "numbers", "a = 0xff\nb = 1_000\nc = 0b1\nd = -0.0\ne = 1e308\n")
put("toml", "dotted", "a." * 40 + "a = 1\n")
put("toml", "nested", "a = " + "[" * 20 + "]" * 20)
put("toml", "inline", "a = {b = {c = {d = {e = 1}}}}\n")
