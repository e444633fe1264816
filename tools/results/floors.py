#!/usr/bin/env python3
"""What the largest items of a pass would cost at their floor.

    python3 tools/results/floors.py items TRACE.json CONFIG BATCH SEQ >> FILE.jsonl
    python3 tools/results/floors.py FILE.jsonl COPY_GBPS GEMM_TFLOPS

The first adds up a trace (`tapeline bench --trace`) by name, as one line
{"kernels": CONFIG, "batch", "seq", "items": [{name, calls, us, threads, bytes}]}:
all that the GPU did in one forward and backward pass; CONFIG is the name of a file
of configs/. The second reads such lines. Kernels of one purpose are added; the floor
of a purpose is the time that its multiplications would take at the rate of a large
product, or its bytes at that of a copy, whichever is more. Floating-point
operations are counted without what masks and causality leave out; bytes once for
each array of grouped products, sparse attention and what does not multiply. Prints a
table of the ten largest for each pass, and what is left.
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
    ("sparse attention, forward", r"sparse_detail::forward|^sparse_attention_forward"),
    ("sparse attention, backward", r"sparse_detail::|^sparse_attention_|^invert_"),
    ("attention, forward", r"^attention_detail::forward|^attention_forward"),
    ("attention, backward", r"^attention_"),
    ("selection of keys", r"indexer_detail::|^indexer_score|top_k_"),
    ("loss of the indexer, forward", r"indexer_loss_(forward|kl)"),
    ("loss of the indexer, backward", r"indexer_loss_"),
    ("dense products and the head (cuBLASLt)", r"nvjet|gemm|splitK|cublas"),
    ("cross-entropy, forward and backward", r"cross_entropy_"),
    ("norms, forward", r"_norm_forward"),
    ("norms, backward", r"_norm_backward|norm_gradients|add_norm_parts"),
    ("swiglu, forward", r"swiglu_forward"),
    ("swiglu, backward", r"swiglu_backward"),
    ("dispatch to experts, forward", r"dispatch_forward"),
    ("dispatch to experts, backward", r"dispatch_backward"),
    ("combining of experts, forward", r"combine_forward"),
    ("combining of experts, backward", r"combine_backward"),
    ("rope, forward and backward", r"^rope_kernel"),
    ("sums, casts and copies", r"^map_packs"),
    ("sums of gradients set to zero", r"^memset$"),
]

SIZES = {"bf16": 2, "float": 4, "double": 8, "int": 4, "long": 8}


def experts_of(m):
    return m.get("n_routed_experts") or m["num_experts"]


def shared_of(m):
    return m["moe_intermediate_size"] * m.get("n_shared_experts", 0)


def further_of(m):
    """Layers that predict a further token; they are layers like the others."""
    return m.get("num_nextn_predict_layers", 0)


def owners_of(m):
    """Layers that select keys themselves."""
    return m["indexer_types"].count("full") + further_of(m) if "indexer_types" in m else 0


def kinds_of(m):
    return (m.get("mlp_layer_types", ["sparse"] * m["num_hidden_layers"])
            + ["sparse"] * further_of(m))


def weights(m):
    """Elements: of all layers' dense matrices, a product of two states for each
    further token among them; of all indexers; of all experts; of the head."""
    h, heads = m["hidden_size"], m["num_attention_heads"]
    indexers = 0
    if "kv_lora_rank" in m:
        nope, rope, v = m["qk_nope_head_dim"], m["qk_rope_head_dim"], m["v_head_dim"]
        q, kv = m["q_lora_rank"], m["kv_lora_rank"]
        each = (h * q + q * heads * (nope + rope) + h * (kv + rope)
                + heads * kv * (nope + v) + heads * v * h)
        index = m["index_n_heads"] * m["index_head_dim"]
        indexers = owners_of(m) * (q * index + h * m["index_head_dim"] + h * m["index_n_heads"])
    else:
        d = m["head_dim"]
        each = 2 * h * heads * d + 2 * h * m["num_key_value_heads"] * d
    kinds = kinds_of(m)
    moe = kinds.count("sparse")
    dense = (len(kinds) * each + further_of(m) * 2 * h * h
             + kinds.count("dense") * 3 * h * m["intermediate_size"]
             + moe * (h * experts_of(m) + 3 * h * shared_of(m)))
    return {"dense": dense, "indexers": indexers, "head": h * m["vocab_size"],
            "experts": moe * experts_of(m) * 3 * h * m["moe_intermediate_size"]}


def floors(m, batch, seq, trains_indexers):
    """Returns purpose -> (floating-point operations, bytes) of a pass."""
    tokens = batch * seq
    w = weights(m)
    h, heads, inner = m["hidden_size"], m["num_attention_heads"], m["moe_intermediate_size"]
    layers = m["num_hidden_layers"] + further_of(m)
    moe = kinds_of(m).count("sparse")
    rows = tokens * m["num_experts_per_tok"]
    uses = 1 + further_of(m)  # of embedding and head
    grouped = 6 * rows * h * inner * moe
    # Of both products of an expert: what goes in and what comes out.
    routed_rows = 2 * rows * (2 * h + 3 * inner) * moe
    gated = (rows * inner + tokens * shared_of(m)) * moe
    gated += tokens * m["intermediate_size"] * (layers - moe)
    routed = 2 * h * (tokens + rows) * moe
    # An indexer's inputs get no gradient.
    indexers = (4 if trains_indexers else 2) * w["indexers"]
    out = {
        "grouped products, forward": (grouped, 2 * w["experts"] + routed_rows),
        "grouped products, input gradients": (grouped, 2 * w["experts"] + routed_rows),
        # Sums in fp32 are read and written.
        "grouped products, weight gradients": (grouped, 8 * w["experts"] + routed_rows),
        "dense products and the head (cuBLASLt)":
            (tokens * (6 * (w["dense"] + uses * w["head"]) + indexers), 0),
        # Logits become their gradient.
        "cross-entropy, forward and backward": (0, 4 * tokens * uses * m["vocab_size"]),
        "swiglu, forward": (0, 6 * gated),
        "swiglu, backward": (0, 10 * gated),
        "dispatch to experts, forward": (0, routed),
        "dispatch to experts, backward": (0, routed),
        "combining of experts, forward": (0, routed),
        "combining of experts, backward": (0, routed + 2 * h * rows * moe),
    }
    normed = layers * 2 * h + h + further_of(m) * 3 * h
    if "kv_lora_rank" in m:
        rope = m["qk_rope_head_dim"]
        d, v = m["kv_lora_rank"] + rope, m["kv_lora_rank"]
        pairs = batch * sum(min(t + 1, m["index_topk"]) for t in range(seq))
        index, owners = m["index_n_heads"] * m["index_head_dim"], owners_of(m)
        out["sparse attention, forward"] = (
            2 * heads * pairs * (d + v) * layers, 2 * tokens * (heads * (d + v) + d) * layers)
        out["sparse attention, backward"] = (
            2 * heads * pairs * (3 * d + 2 * v) * layers, 4 * tokens * (heads * (d + v) + d) * layers)
        out["selection of keys"] = (2 * index * batch * seq * (seq + 1) // 2 * owners, 0)
        out["loss of the indexer, forward"] = (2 * pairs * (heads * d + index) * owners, 0)
        # Scores again, and the gradients of queries and keys.
        out["loss of the indexer, backward"] = (6 * pairs * index * owners, 0)
        normed += layers * (m["q_lora_rank"] + m["kv_lora_rank"])
        turned = layers * (heads + 1) * rope + owners * (m["index_n_heads"] + 1) * rope // 2
    else:
        pairs = batch * seq * (seq + 1) // 2
        forward = 4 * heads * pairs * m["head_dim"] * layers
        out["attention, forward"] = (forward, 0)
        out["attention, backward"] = (5 * forward // 2, 0)
        turned = layers * (heads + m["num_key_value_heads"]) * m["head_dim"]
        normed += turned
    out["norms, forward"] = (0, 4 * tokens * normed)
    out["norms, backward"] = (0, 6 * tokens * normed)
    out["rope, forward and backward"] = (0, 8 * tokens * turned)
    return out


def bytes_of(item):
    """What an item's threads read and write, where its name says it."""
    if item["name"] == "memset":
        return item["bytes"]
    kind = re.fullmatch(r"map_packs<(\d+), \w+<[^<>]*>, ([\w, ]+)>", item["name"])
    if kind is None:
        return 0
    pack, (to, *sources) = int(kind[1]), [SIZES[t] for t in kind[2].split(", ")]
    # elementwise.cu: up to 64 bytes of loads a thread.
    packs = min(max(64 // (pack * sum(sources)), 1), 4) if sources else 4
    return item["threads"] * packs * pack * (to + sum(sources))


def purpose(name):
    for label, expression in PURPOSES:
        if re.search(expression, name):
            return label
    return "`" + re.sub(r"<.*", "", name) + "`"


def items(path, config, batch, seq):
    by_name = {}
    for event in json.load(open(path, encoding="utf-8"))["traceEvents"]:
        if event["ph"] != "X":
            continue
        arguments = event.get("args", {})
        entry = by_name.setdefault(event["name"], {"calls": 0, "us": 0.0, "threads": 0, "bytes": 0})
        entry["calls"] += 1
        entry["us"] += event["dur"]
        threads = 1
        for extent in arguments.get("grid", [0]) + arguments.get("block", []):
            threads *= extent
        entry["threads"] += threads
        entry["bytes"] += arguments.get("bytes", 0)
    order = sorted(by_name.items(), key=lambda item: -item[1]["us"])
    print(json.dumps({"kernels": config, "batch": int(batch), "seq": int(seq),
                      "items": [{"name": name, **entry, "us": round(entry["us"], 1)} for name, entry in order]}))


def tables(path, copy, gemm):
    copy, gemm = float(copy) * 1e9, float(gemm) * 1e12
    rows = [json.loads(line) for line in open(path, encoding="utf-8")]
    passes = [row for row in rows if "kernels" in row]
    if not passes:
        raise ValueError("no line has the kernels of a pass")
    for row in passes:
        config = ROOT / "configs" / (row["kernels"] + ".toml")
        settings = tomllib.loads(config.read_text(encoding="utf-8"))
        trains_indexers = settings.get("loss", {}).get("indexer_coefficient", 0) > 0
        floor = floors(settings["model"], row["batch"], row["seq"], trains_indexers)
        sums = {}
        for item in row["items"]:
            entry = sums.setdefault(purpose(item["name"]), [0, 0.0, 0])
            entry[0] += item["calls"]
            entry[1] += item["us"] / 1e3
            entry[2] += bytes_of(item)
        order = sorted(sums, key=lambda k: -sums[k][1])
        total = sum(ms for _, ms, _ in sums.values())
        print(f"\n{row['kernels']}, {row['batch']} x {row['seq']}: {total:.1f} ms of kernels.\n\n"
              "| purpose | launches | ms | ms at its floor | times its floor |\n|---|---|---|---|---|")
        for label in order[:10]:
            calls, ms, moved = sums[label]
            operations, count = floor.get(label, (0, moved))
            at = 1e3 * max(operations / gemm, count / copy)
            beside = f"{at:.1f} | {ms / at:.1f}" if at > 0 else " | "
            print(f"| {label} | {calls} | {ms:.1f} | {beside} |")
        rest = sum(sums[label][1] for label in order[10:])
        print(f"| {len(order) - 10} others | | {rest:.1f} | | |")


def main():
    words = sys.argv[1:]
    try:
        if len(words) == 5 and words[0] == "items":
            items(*words[1:])
        elif len(words) == 3:
            tables(*words)
        else:
            sys.exit("usage: floors.py items TRACE.json CONFIG BATCH SEQ, or FILE.jsonl COPY_GBPS GEMM_TFLOPS")
    except KeyError as error:
        sys.exit(f"floors.py {' '.join(words)}: no {error} there")
    except (OSError, ValueError, TypeError) as error:
        sys.exit(f"floors.py {' '.join(words)}: {error}")


if __name__ == "__main__":
    main()
