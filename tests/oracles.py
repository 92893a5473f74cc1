"""Oracles in numpy, in float64 for the truth and in float32 for what one rounding may cost."""

from __future__ import annotations

from typing import Any

import numpy as np


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


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``a @ b``; in float32 one term after the other, as the plainest accumulator does."""
    if a.dtype == np.float64:
        return a @ b
    total = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))
    total = total.astype(a.dtype)
    for i in range(a.shape[-1]):
        total += a[..., :, i, None] * b[..., None, i, :]
    return total


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
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """``out`` and, given its cotangent, the gradients ``q``, ``k``, ``v``, ``mask``, ``sinks``.

    Beside them, by the same names, the sums of the absolute terms from which each is made.
    """
    q, k, v = (np.asarray(a, dtype) for a in (q, k, v))
    batch, heads, queries, _ = q.shape
    share = heads // k.shape[1]
    kk, vv = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
    added = attention_mask(mask, window, queries, k.shape[2]).astype(dtype)
    scores = product(q * dtype(scale), kk.swapaxes(-1, -2))
    bend = np.ones_like(scores)
    if softcap is not None:
        tanh = np.tanh(scores / dtype(softcap))
        scores, bend = dtype(softcap) * tanh, 1 - tanh**2
    # A row without any key averages the values, or gives all to its sink.
    scores = np.maximum(scores + added, np.finfo(dtype).min)
    top = scores.max(-1, keepdims=True)
    sink = np.full((1, heads, 1, 1), -np.inf, dtype)
    if sinks is not None:
        sink = np.asarray(sinks, dtype).reshape(1, -1, 1, 1)
        top = np.maximum(top, sink)
    exponentials, sink = np.exp(scores - top), np.exp(sink - top)
    total = exponentials.sum(-1, keepdims=True) + sink
    p = exponentials / total
    found, terms = {"out": product(p, vv)}, {"out": p @ np.abs(vv)}
    if cotangent is None:
        return found, terms
    d_out = np.asarray(cotangent, dtype)
    d_p = product(d_out, vv.swapaxes(-1, -2))
    mean = (p * d_p).sum(-1, keepdims=True)
    d_added = np.where(np.isinf(added), dtype(0), p * (d_p - mean))
    d_scores = d_added * bend * dtype(scale)
    large = np.abs(d_out) @ np.abs(vv).swapaxes(-1, -2)
    large_mean = (p * large).sum(-1, keepdims=True)
    large = p * (large + large_mean)

    def grouped(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """``a.T @ b`` over the queries of all heads that share a key head."""
        a, b = (x.reshape(batch, heads // share, -1, x.shape[-1]) for x in (a, b))
        return product(a.swapaxes(-1, -2), b)

    found |= {
        "q": product(d_scores, kk),
        "k": grouped(d_scores, q),
        "v": grouped(p, d_out),
        "sinks": (-(sink / total) * mean).sum((0, 2, 3)),
    }
    terms |= {
        "q": large * scale @ np.abs(kk),
        "k": grouped(large * dtype(scale), np.abs(q)),
        "v": grouped(p, np.abs(d_out)),
        "sinks": (sink / total * large_mean).sum((0, 2, 3)),
    }
    if isinstance(mask, np.ndarray) and mask.dtype != bool:
        found["mask"], terms["mask"] = (_summed_to(a, mask.shape) for a in (d_added, large))
    return found, terms


def _summed_to(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of broadcasting ``shape`` to that of ``array``."""
    array = array.sum(tuple(range(array.ndim - len(shape))))
    return array.sum(tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)
