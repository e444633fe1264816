#!/usr/bin/env python3
"""What the largest items of a pass would cost at their floor.

    python3 tools/results/floors.py FILE.jsonl COPY_GBPS GEMM_TFLOPS

Reads lines {"kernels": config, "batch", "seq", "items": [{name, calls, us}]}: all
that the GPU did in one forward and backward pass, by name (`tapeline bench
--trace`). Kernels of one purpose are added; the floor of a purpose is the time
that its multiplications would take at the rate of a large product, or its bytes
at that of a copy, whichever is more. Floating-point operations are counted
without what masks and causality leave out, bytes once for each array. Prints
a table of the ten largest for each pass, and what is left.
"""

import json
import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

PURPOSES = [
    ("grouped products, forward", r"grouped_matmul_wgmma.*Pass\)0"),
    ("grouped products, input gradients", r"grouped_matmul_wgmma.*Pass\)1"),
    ("grouped products, weight gradients", r"grouped_matmul_wgmma.*Pass\)2"),
    ("sparse attention, forward", r"sparse_detail::forward"),
    ("sparse attention, backward", r"sparse_detail::"),
    ("attention, forward", r"attention_detail::forward"),
    ("attention, backward", r"attention_detail::"),
    ("selection of keys", r"indexer_detail::|top_k|select"),
    ("dense products and the head (cuBLASLt)", r"nvjet|gemm|splitK|cublas"),
    ("sums of gradients set to zero", r"^memset$"),
]


def weights(m):
    """Elements of a layer's dense matrices, of its experts, and of the head."""
    h, heads = m["hidden_size"], m["num_attention_heads"]
    layers = m["num_hidden_layers"]
    dense = [0] * layers
    if "kv_lora_rank" in m:
        nope, rope, v = m["qk_nope_head_dim"], m["qk_rope_head_dim"], m["v_head_dim"]
        q, kv = m["q_lora_rank"], m["kv_lora_rank"]
        each = (h * q + q * heads * (nope + rope) + h * (kv + rope)
                + heads * kv * (nope + v) + heads * v * h)
    else:
        d = m["head_dim"]
        each = 2 * h * heads * d + 2 * h * m["num_key_value_heads"] * d
    experts = m.get("n_routed_experts") or m["num_experts"]
    kinds = m.get("mlp_layer_types", ["sparse"] * layers)
    for i, kind in enumerate(kinds):
        dense[i] = each
        if kind == "dense":
            dense[i] += 3 * h * m["intermediate_size"]
        else:
            dense[i] += h * experts
            dense[i] += 3 * h * m["moe_intermediate_size"] * m.get("n_shared_experts", 0)
    expert = 3 * h * m["moe_intermediate_size"]
    return sum(dense), kinds.count("sparse"), expert, experts, h * m["vocab_size"]


def floors(m, batch, seq):
    """Returns purpose -> (floating-point operations, bytes) of a pass."""
    tokens = batch * seq
    dense, moe_layers, expert, experts, head = weights(m)
    rows = tokens * m["num_experts_per_tok"]
    heads, layers = m["num_attention_heads"], m["num_hidden_layers"]
    grouped = 2 * rows * expert * moe_layers
    bf16 = 2 * experts * expert * moe_layers
    out = {
        "grouped products, forward": (grouped, bf16),
        "grouped products, input gradients": (grouped, bf16),
        # Sums in fp32 are read and written.
        "grouped products, weight gradients": (grouped, 4 * bf16),
        "dense products and the head (cuBLASLt)": (6 * tokens * (dense + head), 0),
        "sums of gradients set to zero":
            (0, 4 * (dense + 2 * head + experts * expert * moe_layers)),
    }
    if "kv_lora_rank" in m:
        d, v = m["kv_lora_rank"] + m["qk_rope_head_dim"], m["kv_lora_rank"]
        pairs = batch * sum(min(t + 1, m["index_topk"]) for t in range(seq))
        forward = 2 * heads * pairs * (d + v) * layers
        backward = 2 * heads * pairs * (3 * d + 2 * v) * layers
        out["sparse attention, forward"] = (forward, 0)
        # A row for each key of a query, written and read in bf16.
        out["sparse attention, backward"] = (backward, 4 * pairs * d * layers)
        owners = m["indexer_types"].count("full")
        index = m["index_n_heads"] * m["index_head_dim"]
        out["selection of keys"] = (2 * index * batch * seq * (seq + 1) // 2 * owners, 0)
    else:
        pairs = batch * seq * (seq + 1) // 2
        forward = 4 * heads * pairs * m["head_dim"] * layers
        out["attention, forward"] = (forward, 0)
        out["attention, backward"] = (5 * forward // 2, 0)
    return out


def purpose(name):
    for label, expression in PURPOSES:
        if re.search(expression, name):
            return label
    return "`" + re.sub(r"<.*", "", name) + "`"


def main():
    if len(sys.argv) != 4:
        sys.exit("usage: floors.py FILE.jsonl COPY_GBPS GEMM_TFLOPS")
    try:
        copy, gemm = float(sys.argv[2]) * 1e9, float(sys.argv[3]) * 1e12
        rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
    except (OSError, ValueError) as error:
        sys.exit(f"floors.py {' '.join(sys.argv[1:])}: {error}")
    passes = [row for row in rows if "kernels" in row]
    if not passes:
        sys.exit(f"{sys.argv[1]}: no line has the kernels of a pass")
    for row in passes:
        path = ROOT / "configs" / (row["kernels"] + ".toml")
        model = tomllib.loads(path.read_text(encoding="utf-8"))["model"]
        floor = floors(model, row["batch"], row["seq"])
        sums = {}
        for item in row["items"]:
            entry = sums.setdefault(purpose(item["name"]), [0, 0.0])
            entry[0] += item["calls"]
            entry[1] += item["us"] / 1e3
        order = sorted(sums, key=lambda k: -sums[k][1])
        total = sum(ms for _, ms in sums.values())
        print(f"\n{row['kernels']}, {row['batch']} x {row['seq']}: {total:.1f} ms of kernels.\n\n"
              "| purpose | launches | ms | ms at its floor |\n|---|---|---|---|")
        for label in order[:10]:
            calls, ms = sums[label]
            at = ""
            if label in floor:
                operations, count = floor[label]
                at = f"{1e3 * max(operations / gemm, count / copy):.1f}"
            print(f"| {label} | {calls} | {ms:.1f} | {at} |")
        rest = sum(sums[label][1] for label in order[10:])
        print(f"| {len(order) - 10} others | | {rest:.1f} | |")


if __name__ == "__main__":
    main()
