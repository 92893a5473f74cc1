"""Attention of a token to latent rows, as DeepSeek-V3 decodes: checks and the choice of a path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..dispatch import Operation, Plan, dispatch, either
from ..dispatch.choice import choose_measured
from ..measurements.thresholds import Measured, threshold
from ..metal.attention import latent as kernels
from ..reference import latent_attention as reference
from .signature import Signature


def latent_attention(
    q: mx.array,
    r: mx.array,
    c: mx.array,
    p: mx.array,
    last: mx.array,
    *,
    scale: float,
    mask: mx.array | None = None,
) -> mx.array:
    """Attention of one token to latent rows, and to rows beside them that hold the positions.

    Args:
        q: (B, H, 1, D), queries of latent rows, in float32, float16 or bfloat16.
        r: (B, H, 1, R), queries of the rows beside them, in the dtype of ``q``.
        c: (B, 1, S, D), latent rows, keys and values at once.
        p: (B, 1, S, R), the rows beside them.
        last: 0-d int32, the last row that counts.
        scale: of the scores ``q c^T + r p^T``.
        mask: (B or 1, 1, 1, S) booleans: rows that are seen; or None.

    Returns:
        (B, H, 1, D) in the dtype of ``q``. A query that sees no row is undefined.

    Raises:
        ValueError: an argument has a shape or dtype that does not fit; it is named.

    Example:
        >>> q, r = mx.ones((1, 4, 1, 64)), mx.ones((1, 4, 1, 32))
        >>> rows = mx.ones((1, 1, 9, 64)), mx.ones((1, 1, 9, 32))
        >>> latent_attention(q, r, *rows, mx.array(5), scale=0.1).shape
        (1, 4, 1, 64)

    Source: multi-head latent attention, arXiv 2405.04434; mlx-lm's ``deepseek_v3``.
    """
    return dispatch(LATENT_ATTENTION, (q, r, c, p, last, mask), (scale,))[0]


def _plan(arrays: Sequence[Any], scale: float) -> Plan:
    _TAKES.check(*arrays, scale)
    scale, (q, r, c, _, _, mask) = float(scale), arrays
    (batch, heads, _, width), rows = q.shape, c.shape[2]
    takes = kernels.takes(q, r, rows) and c.shape[1] == 1
    key = (rows, batch, heads, width, r.shape[3]), q.dtype, ()
    reason, most = None, threshold("latent_attention_rows")
    if most is not None:
        many = f"{rows} rows, more than {most} for each of {batch} sequences"
        reason = Measured(many if rows > most * batch else "")
    name = "latent_attention"  # of the family, too
    choice = choose_measured(name, takes, name, *key, reason=reason)
    composed = reference.latent_attention(scale)
    return either(choice, composed, arrays, lambda: kernels.latent_step(q, r, c, mask, scale))


def _sample(arrays: list[Any], scale: float) -> list[Any]:
    *beside, _, mask = arrays
    return [*beside, mx.array(max(0, arrays[2].shape[2] - 3), mx.int32), mask]


_TAKES = Signature("""
    q: float (B, H, 1, D)
    r: q (B, H, 1, R)
    c: q (B, 1, S, D)
    p: q (B, 1, S, R)
    last: int32 ()
    mask: bool (1|B, 1, 1, S) or None
    scale: number
""")
LATENT_ATTENTION = Operation("latent_attention", _plan, sample=_sample)
