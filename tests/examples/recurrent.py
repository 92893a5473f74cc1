"""Random steps of the gated delta rule and of latent attention, and their results in float64."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np

from mlx_qlayers.ops.gated_delta import gated_delta
from mlx_qlayers.ops.latent_attention import latent_attention
from tests.examples.arrays import DTYPES, dtype_of, placed
from tests.examples.calls import Call, Numbers, Random
from tests.numerics import IN_FLOAT32, random, round_to, to64
from tests.oracles import summed


def _by_token(n: Numbers, absolute: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Token after token; or what the absolute terms of its sums add up to."""
    parts = [n[x] for x in ("q", "k", "v", "state")]
    q, k, v, state = (np.abs(a) for a in parts) if absolute else parts
    g, beta, rows = n["g"], n["beta"], []
    for t in range(v.shape[1]):
        key, query = (np.repeat(a[:, t], v.shape[2] // a.shape[2], 1)[..., None, :] for a in (k, q))
        gate = g[:, t, :, None, None] if g.ndim == 3 else g[:, t, :, None]
        change = v[:, t] + (1 if absolute else -1) * summed(state * gate * key)
        new = state * gate + key * (beta[:, t, :, None] * change)[..., None]
        rows.append(summed(new * query))
        shown = n["mask"][:, t, None, None, None] > 0 if "mask" in n else True
        state = np.where(shown, new, state)
    return np.stack(rows, 1), state


def _gated_delta(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    dtype, (key_heads, share) = dtype_of(case.dtype), case.heads
    gates = case.batch, case.length, key_heads * share
    scale = case.width**-0.5
    q, k = (random(rng, (*gates[:2], key_heads, case.width), dtype, scale) for _ in range(2))
    norms = (1e-3, 0.25, 0.5) if case.size else None
    if norms:  # rows of any size, and small ones to which the epsilon counts
        q, k = case.size * q, k / case.size
    operands = {
        "q": q,
        "k": k,
        "v": random(rng, (*gates, case.values), dtype),
        "g": mx.array(rng.uniform(0.5, 1, (*gates, case.width)[: 3 + case.columns]), mx.float32),
        "beta": round_to(rng.uniform(0, 1, gates), dtype),
        "state": random(rng, (case.batch, gates[2], case.values, case.width)),
        "mask": mx.array(rng.uniform(size=gates[:2]) > 0.3) if case.masked else None,
    }
    given = placed([*operands], [*operands.values()], case.layouts)

    def expected(n: Numbers, up: list[np.ndarray], _: bool) -> tuple[Numbers, Numbers]:
        kind, n = n["q"].dtype, dict(n)
        for name, factor in zip("qk", norms[1:], strict=True) if norms else ():
            mean = summed(n[name] ** 2)[..., None] / kind.type(case.width)
            mean = np.sqrt(mean + kind.type(norms[0]))
            n[name] = n[name] / mean * kind.type(factor)
            if kind == np.float32:
                n[name] = to64(round_to(n[name], dtype)).astype(kind)
        of = [_by_token(n)] + ([_by_token(n, True)] if kind == np.float64 else [])
        named = [dict(zip("01", each, strict=True)) for each in of]
        # Keys and queries are as exact as their norms: a sum, its root, a quotient and a product.
        return named[0], {name: (1 + (norms is not None)) * a for name, a in named[-1].items()}

    full = (case.length > 0 and case.width % 32 == 0) or case.width == 16
    dtypes, shape = (dtype, mx.float32), (*gates, case.values)
    return Call(gated_delta, given, {"norms": norms}, shape, expected, (), full, dtypes)


GATED_DELTA = Random(
    {
        "batch": [1, 2, 3],
        "length": [4, 1, 2, 5, 7],
        # Of keys, and values for each.
        "heads": [(2, 2), (1, 1), (1, 2), (2, 3)],
        "width": [64, 32, 128],
        "values": [24, 3, 8, 32],
        "columns": [False, True],
        "masked": [False, True],
        "size": [0, 0, 1.0, 30.0],
        "dtype": ("float32", DTYPES),
    },
    _gated_delta,
    [
        {"batch": 2, "length": 5, "width": 32, "masked": True},
        {"heads": (1, 2), "values": 3, "columns": True, "dtype": "bfloat16"},
        {"batch": 2, "length": 1, "heads": (1, 1), "width": 16, "values": 8, "columns": True}
        | {"masked": True, "dtype": "float16"},
        {"length": 7, "heads": (2, 3), "width": 128, "values": 32, "dtype": "bfloat16"},
        {"batch": 2, "length": 5, "width": 32, "masked": True, "size": 1.0},
        {"length": 7, "heads": (2, 3), "width": 128, "values": 32, "size": 30.0}
        | {"dtype": "bfloat16"},
    ],
)


def _latent_attention(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    dtype, (width, turned) = dtype_of(case.dtype), case.widths
    q = random(rng, (case.batch, case.heads, 1, width + turned), dtype)
    q, r = mx.split(q, [width], axis=-1)  # as models have them, parts of one
    c, p = (random(rng, (case.batch, 1, case.rows, n), dtype) for n in case.widths)
    shown = rng.uniform(size=(case.batch, 1, 1, case.rows)) > 0.4
    shown[..., 0] = True
    last, scale = int(case.share * (case.rows - 1)), (width + turned) ** -0.5
    given = {"q": q, "r": r, **placed(("c", "p"), (c, p), case.layouts), "last": mx.array(last)}
    given["mask"] = mx.array(shown) if case.masked else None

    def expected(n: Numbers, up: list[np.ndarray], stock: bool) -> tuple[Numbers, Numbers]:
        c, kind = n["c"], n["c"].dtype.type
        scores = n["q"] @ c.swapaxes(-1, -2) + n["r"] @ n["p"].swapaxes(-1, -2)
        seen = (np.arange(case.rows) <= last) & (n.get("mask", np.ones(1)) > 0)
        scores = np.where(seen, scores * kind(scale), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        y = weights / weights.sum(-1, keepdims=True) @ c
        # A weight is as exact as its score, of some units; the reference rounds both to the dtype.
        return {"0": y}, {"0": 8 * np.abs(c).max() * (IN_FLOAT32[dtype] if stock else 1)}

    return Call(latent_attention, given, {"scale": scale}, (*q.shape[:3], width), expected)


LATENT_ATTENTION = Random(
    {
        "batch": [1, 2, 3],
        "heads": [4, 1, 3, 6],
        "rows": [20, 9, 140, 256],
        "widths": [(64, 32), (32, 32), (128, 64)],
        "share": [0.7, 0.1, 1.0],
        "masked": [False, True],
        "dtype": ("float32", DTYPES),
    },
    _latent_attention,
    [
        {},
        {"batch": 2, "heads": 3, "rows": 140, "share": 0.93, "masked": True, "dtype": "bfloat16"},
        {"heads": 6, "rows": 256, "widths": (128, 64), "share": 0.15, "dtype": "float16"},
        {"batch": 2, "heads": 2, "rows": 9, "widths": (32, 32), "share": 1.0, "masked": True},
    ],
)
