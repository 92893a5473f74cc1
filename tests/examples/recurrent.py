"""Random steps of the gated delta rule and of latent attention, and their results in float64."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_qlayers.ops.gated_delta import gated_delta
from mlx_qlayers.ops.latent_attention import latent_attention
from tests.attention_roundings import SPREAD
from tests.examples.arrays import DTYPES, dtype_of, placed
from tests.examples.calls import Call, Numbers, Random
from tests.numerics import IN_FLOAT32, random, round_to, to64


def _rounded(x: np.ndarray, of: np.ndarray) -> np.ndarray:
    """The squares of what roundings of ``x`` make of ``x @ of``: equal columns have equal ones."""
    return np.where(_alike(x), (x @ of) ** 2, x**2 @ of**2)


def _alike(x: np.ndarray) -> np.ndarray:
    same: np.ndarray = (x == x[..., :1]).all(-1, keepdims=True)
    return same


def _dot(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums along the last axis, one term after the other, and the squares of their roundings.

    Each term is rounded, and each sum up to it, which of equal terms goes the same way each time:
    to a multiple of the sum's unit comes the same number again.
    """
    terms, ones = a * b, np.ones((a.shape[-1], 1))
    up_to = np.cumsum(terms, -1, terms.dtype)
    squares = np.where(_alike(terms), (np.abs(up_to) @ ones) ** 2, up_to**2 @ ones)
    return up_to[..., -1:], squares + _rounded(terms, ones)


def _moved(of: np.ndarray, tokens: list[tuple[Any, ...]], last: Any = None) -> np.ndarray:
    """The squares of what roundings of the states up to a token make of it times ``of``.

    ``tokens`` have keys (B, H, 1, D), gates and so on, the state before and behind a token, and
    squares of what its change is off by itself; ``last`` says whether the last one is shown.
    """
    squares = np.zeros(1)
    for key, gate, strength, old, new, own, shown in reversed(tokens):
        shown, last = shown if last is None else last, None
        by_change = key @ of
        before = of - strength * key.swapaxes(-1, -2) * by_change
        found = _rounded(new, of) + own * by_change**2 + _rounded(old, before)
        squares = squares + np.where(shown, found, 0)
        of = np.where(shown, gate.swapaxes(-1, -2) * before, of)
    return squares


def _by_token(n: Numbers, inexact: Numbers) -> tuple[Numbers, Numbers]:
    """Token after token, and the errors by independent roundings, in float32's, to first order.

    ``inexact`` has the roundings of whole rows of q and k, as shares of them.
    """
    state, tokens, rows = n["state"], [], []
    for t in range(n["v"].shape[1]):
        shared = n["v"].shape[2] // n["q"].shape[2]
        query, key, of_query, of_key = (
            np.repeat(a[:, t], shared, 1)[..., None, :]
            for a in (n["q"], n["k"], inexact["q"], inexact["k"])
        )
        gate = n["g"][:, t].reshape(*key.shape[:3], -1)
        strength, value = n["beta"][:, t, :, None, None], n["v"][:, t, ..., None]
        old = state * gate
        predicted, own = _dot(old, key)
        change = strength * (value - predicted)
        own = strength**2 * own + 2 * change**2 + (of_key * (change - strength * predicted)) ** 2
        new = old + key * change
        shown = n["mask"][:, t, None, None, None] > 0 if "mask" in n else True
        tokens.append((key, gate, strength, old, new, own, shown))
        # The kernel adds up the products of the query with the old state, and with the key.
        y, both = _dot(new, query)[0], (_dot(old, query)[1], change**2 * _dot(key, query)[1])
        off = sum(both) + y**2 * (1 + of_query**2) + _moved(query.swapaxes(-1, -2), tokens, True)
        terms = np.abs(new * query).sum(-1)
        rows.append((y[..., 0], np.maximum(terms, SPREAD * np.sqrt(off[..., 0]))))
        state = np.where(shown, new, state)
    y, of_y = (np.stack(each, 1) for each in zip(*rows, strict=True))
    of_state = np.sqrt(_moved(np.eye(state.shape[-1])[None, None], tokens))
    return {"0": y, "1": state}, {"0": of_y, "1": SPREAD * of_state}


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
        kind, n, inexact = n["q"].dtype, dict(n), {x: np.zeros((*n[x].shape[:3], 1)) for x in "qk"}
        for name, factor in zip("qk", norms[1:], strict=True) if norms else ():
            total, off = _dot(n[name], n[name])
            root = np.sqrt(total / kind.type(case.width) + kind.type(norms[0]))
            n[name] = n[name] / root * kind.type(factor)
            # Half of those of the sum, the mean and the epsilon; the root, a quotient, a product.
            inexact[name] = np.sqrt(off / np.maximum(total, 1e-30) ** 2 / 4 + 3.5)
            if kind == np.float32:
                n[name] = to64(round_to(n[name], dtype)).astype(kind)
        return _by_token(n, inexact)

    full = (case.length > 0 and case.width % 32 == 0) or case.width == 16
    full &= case.backend != "as metal"  # where mlx-lm has a kernel
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
        # Terms that are alike: each of their sums is rounded.
        {"batch": 2, "length": 1, "heads": (1, 1), "width": 32, "values": 3}
        | {"layouts": ("broadcast last",) * 4 + ("dense", "broadcast last")},
    ],
)


def _latent_attention(case: SimpleNamespace, rng: np.random.Generator) -> Call:
    dtype, (width, rotated) = dtype_of(case.dtype), case.widths
    q = random(rng, (case.batch, case.heads, 1, width + rotated), dtype)
    q, r = mx.split(q, [width], axis=-1)  # as models have them, parts of one
    c, p = (random(rng, (case.batch, 1, case.rows, n), dtype) for n in case.widths)
    shown = rng.uniform(size=(case.batch, 1, 1, case.rows)) > 0.4
    shown[..., 0] = True
    last, scale = int(case.share * (case.rows - 1)), (width + rotated) ** -0.5
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
