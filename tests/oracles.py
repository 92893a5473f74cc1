"""Oracles in numpy, in float64 for the truth and in float32 for what one rounding may cost."""

from typing import Any

import numpy as np

from tests.attention_roundings import Units, Weights


def sums(
    a: np.ndarray, b: np.ndarray, parts: np.ndarray, start: np.ndarray | None = None
) -> np.ndarray:
    """The error of ``start + a @ b`` in float32's roundings: the larger of two estimates.

    One is the sum of the absolute terms, of which ``parts`` are the factors beside ``a``. The other
    adds the squares of independent roundings: of each term, and of each sum up to it where they
    are added one after the other, as few terms that are much larger than others show.
    """
    total = np.zeros((1, 1)) if start is None else start
    terms, squares = np.abs(total) + np.abs(a) @ parts, a**2 @ parts**2
    for i in range(a.shape[-1]):
        total = total + a[..., :, i, None] * b[..., None, i, :]
        squares = squares + total**2
    found: np.ndarray = np.maximum(terms, np.sqrt(squares))
    return found


_EXACT = Units()


def attention_mask(mask: Any, window: int | None, queries: int, keys: int) -> np.ndarray:
    """Numbers to add to the scores, -inf where a key is hidden; broadcasts to (B, H, L, S)."""
    row = np.arange(queries)[:, None] + keys - queries
    column = np.arange(keys)[None]
    added = np.zeros((queries, keys))
    if window is not None:
        added = np.where((column <= row) & (column > row - window), added, -np.inf)
    if isinstance(mask, str):
        return np.where(column <= row, added, -np.inf)
    if mask is None:
        return added
    if mask.dtype == bool:
        return np.where(mask, added, -np.inf)
    return mask + added


def product(a: np.ndarray, b: np.ndarray, start: np.ndarray | float = 0.0) -> np.ndarray:
    """``start + a @ b``; in float32 one term after the other, as the plainest accumulator does."""
    if a.dtype == np.float64:
        return start + a @ b
    total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))
    total = (total + start).astype(a.dtype)
    for i in range(a.shape[-1]):
        total += a[..., :, i, None] * b[..., None, i, :]
    return total


def summed(a: np.ndarray) -> np.ndarray:
    """Sums along the last axis, one term after the other: terms that are alike lose most."""
    found: np.ndarray = np.cumsum(a, -1, a.dtype)[..., -1]
    return found


def _weights(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    mask: Any,
    window: int | None,
    softcap: float | None,
    sinks: np.ndarray | None,
    units: Units,
) -> Weights:
    """Scores and weights, in the dtype of ``q``."""
    dtype, (heads, queries), share = q.dtype.type, q.shape[1:3], q.shape[1] // k.shape[1]
    kk, vv = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
    added = attention_mask(mask, window, queries, k.shape[2]).astype(dtype)
    raw = product(q * dtype(scale), kk.swapaxes(-1, -2))
    tanh = np.zeros_like(raw) if softcap is None else np.tanh(raw / dtype(softcap))
    capped = raw if softcap is None else dtype(softcap) * tanh
    # A row without any key averages the values, or gives all to its sink, a key without a value.
    sink = np.full(heads, -np.inf) if sinks is None else sinks
    sink = np.broadcast_to(np.asarray(sink, dtype).reshape(-1, 1, 1), (*raw.shape[:3], 1))
    scores = np.concatenate([np.maximum(capped + added, np.finfo(dtype).min), sink], -1)
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    weights = exponentials / product(exponentials, np.ones((exponentials.shape[-1], 1), dtype))
    return Weights(q, kk, vv, scale, softcap, raw, tanh, capped, added, scores, weights, units)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    mask: Any = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    cotangent: np.ndarray | None = None,
    dtype: type = np.float64,
    units: Units = _EXACT,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """``out`` and, given its cotangent, the gradients ``q``, ``k``, ``v``, ``mask``, ``sinks``.

    In float64 beside them, by the same names, in units of float32's rounding: the sums of the
    absolute terms from which each is made, and what the roundings on the way make of it.
    """
    q, k, v = (np.asarray(a, dtype) for a in (q, k, v))
    (batch, heads, *_), share, exact = q.shape, q.shape[1] // k.shape[1], dtype == np.float64
    moved = _weights(q, k, v, scale, mask, window, softcap, sinks, units)
    p, kk, vv = moved.p[..., :-1], moved.k, moved.v
    out = product(p, vv)
    found, terms = {"out": out}, {}
    if exact:
        terms["out"] = p @ np.abs(vv) + moved.of_out(out)
    if cotangent is None:
        return found, terms
    d_out = np.asarray(cotangent, dtype)
    d_p = product(d_out, vv.swapaxes(-1, -2))
    mean = (p * d_p).sum(-1, keepdims=True)
    d_added = np.where(np.isinf(moved.added), dtype(0), p * (d_p - mean))
    d_scores = d_added * (1 - moved.tanh**2) * dtype(scale)

    def grouped(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """``a.T @ b`` over the queries of all heads that share a key head."""
        a, b = (x.reshape(batch, heads // share, -1, x.shape[-1]) for x in (a, b))
        return product(a.swapaxes(-1, -2), b)

    found |= {
        "q": product(d_scores, kk),
        "k": grouped(d_scores, q),
        "v": grouped(p, d_out),
        "sinks": (-moved.p[..., -1:] * mean).sum((0, 2, 3)),
    }
    additive = isinstance(mask, np.ndarray) and mask.dtype != bool
    if additive:
        found["mask"] = _summed_to(d_added, mask.shape)
    if not exact:
        return found, terms
    large = np.abs(d_out) @ np.abs(vv).swapaxes(-1, -2)
    large_mean = (p * large).sum(-1, keepdims=True)
    large = p * (large + large_mean)
    behind, before, of_q = moved.of_scores(d_out, out, d_p)
    terms |= {
        "q": large * np.abs(scale) @ np.abs(kk) + of_q,
        "k": np.abs(scale) * (grouped(large, np.abs(q)) + np.sqrt(grouped(before, q**2))),
        "v": grouped(p, np.abs(d_out)) + np.sqrt(grouped(moved.of_weights(), d_out**2)),
        "sinks": (moved.p[..., -1:] * large_mean).sum((0, 2, 3))
        + np.sqrt(behind[..., -1].sum((0, 2))),
    }
    if additive:
        squares = _summed_to(behind[..., :-1], mask.shape)
        terms["mask"] = _summed_to(large, mask.shape) + np.sqrt(squares)
    return found, terms


def _summed_to(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of broadcasting ``shape`` to that of ``array``."""
    array = array.sum(tuple(range(array.ndim - len(shape))))
    return array.sum(tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)
