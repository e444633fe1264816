"""Writes rope_frequencies.json: inverse frequencies and attention factors from
the published formulas, in exact rationals and 50 decimal digits.

YaRN:    arXiv 2309.00071, equations 17-22, with the ramp over the pair index
         (the form of the reference implementation's find_correction_range).
Llama 3: the piecewise rule by wavelength of the Llama 3.1 release.
Run: python3 make_rope_frequencies.py > rope_frequencies.json
"""

import json
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, getcontext

getcontext().prec = 50
PI = Decimal("3.14159265358979323846264338327950288419716939937511")

CASES = [
    dict(name="default", theta=8000000, dim=64),
    dict(name="llama2", theta=10000, dim=128),
    dict(name="deepseek_v3", scaling="yarn", theta=10000, dim=64, factor=40,
         original=4096, beta_fast=32, beta_slow=1, mscale="1",
         mscale_all_dim="1"),
    dict(name="deepseek_v3 without truncation", scaling="yarn", theta=10000,
         dim=64, factor=40, original=4096, beta_fast=32, beta_slow=1,
         truncate=False),
    dict(name="small", scaling="yarn", theta=10000, dim=16, factor=4,
         original=64, beta_fast=32, beta_slow=1, mscale="0.707",
         mscale_all_dim="1"),
    dict(name="the ends meet", scaling="yarn", theta=1000000, dim=8, factor=2,
         original=6, beta_fast=32, beta_slow=1),
    dict(name="llama3.1", scaling="llama3", theta=500000, dim=128, factor=8,
         original=8192, low=1, high=4),
    dict(name="llama3.2", scaling="llama3", theta=500000, dim=64, factor=32,
         original=8192, low=1, high=4),
]


def yarn_weight(case, pair):
    """How much of pair's frequency is divided by factor."""
    def correction_dim(rotations):
        length = Decimal(case["original"]) / (rotations * 2 * PI)
        return case["dim"] * length.ln() / (2 * Decimal(case["theta"]).ln())

    first = correction_dim(case["beta_fast"])
    last = correction_dim(case["beta_slow"])
    if case.get("truncate", True):
        first = first.to_integral_value(ROUND_FLOOR)
        last = last.to_integral_value(ROUND_CEILING)
    first = max(first, Decimal(0))
    last = min(last, Decimal(case["dim"] - 1))
    if first == last:
        last += Decimal("0.001")
    position = (pair - first) / (last - first)
    return min(max(position, Decimal(0)), Decimal(1))


def frequency(case, pair):
    f = (Decimal(case["theta"]).ln() * -2 * pair / case["dim"]).exp()
    if case.get("scaling") == "yarn":
        w = yarn_weight(case, pair)
        return f / case["factor"] * w + f * (1 - w)
    if case.get("scaling") == "llama3":
        wavelength = 2 * PI / f
        if wavelength < Decimal(case["original"]) / case["high"]:
            return f
        if wavelength > Decimal(case["original"]) / case["low"]:
            return f / case["factor"]
        smooth = (Decimal(case["original"]) / wavelength - case["low"]) / (
            case["high"] - case["low"])
        return (1 - smooth) * f / case["factor"] + smooth * f
    return f


def attention_factor(case):
    if case.get("scaling") != "yarn":
        return Decimal(1)

    def magnitude(scale):
        return Decimal(scale) * Decimal(case["factor"]).ln() / 10 + 1

    if "mscale" in case:
        return magnitude(case["mscale"]) / magnitude(case["mscale_all_dim"])
    return magnitude(1)


out = []
for case in CASES:
    row = dict(case)
    row["frequencies"] = [
        float(frequency(case, j)) for j in range(case["dim"] // 2)]
    row["attention_factor"] = float(attention_factor(case))
    out.append(row)
print(json.dumps(out, indent=1))
