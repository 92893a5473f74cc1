"""Rotary embedding of queries and keys in MLX's own operator."""

from __future__ import annotations

import mlx.core as mx


def rotated(
    q: mx.array,
    k: mx.array,
    offset: mx.array,
    *,
    dims: int,
    traditional: bool,
    base: float | None,
    scale: float,
    freqs: mx.array | None,
) -> list[mx.array]:
    """The same as :func:`mlx_qlayers.metal.rotary.launch.rotated`; arguments as there."""
    return [
        mx.fast.rope(
            x.transpose(0, 2, 1, 3),
            dims,
            traditional=traditional,
            base=base,
            scale=scale,
            offset=offset,
            freqs=freqs,
        )
        for x in (q, k)
    ]
