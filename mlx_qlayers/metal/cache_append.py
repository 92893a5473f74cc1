"""Launches the copy of a cache's buffers that has new keys and values in it."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..runtime.kernel import Kernel

_APPEND = Kernel(
    "cache_append",
    "cache_append.metal",
    inputs=("k_buffer", "v_buffer", "k", "v", "length", "sizes"),
    outputs=("k_out", "v_out"),
    template=("T",),
    large=True,
)
# Rows and 16 bytes of each that a threadgroup copies.
_ROWS, _WORDS = 8, 32


def appended(
    k_buffer: mx.array, v_buffer: mx.array, k: mx.array, v: mx.array, length: mx.array
) -> list[mx.array]:
    """Copies of both buffers whose rows from ``length`` on are the new ones.

    Args:
        k_buffer: (B, Hkv, S, D), rows of whole 16 bytes.
        v_buffer: (B, Hkv, S, Dv), rows of whole 16 bytes.
        k: (B, Hkv, L, D) in the dtype of the buffers.
        v: (B, Hkv, L, Dv).
        length: int32, 0-d, from 0 to S - L.
    """
    batch, heads, rows, _ = k_buffer.shape
    words = [a.shape[3] * a.dtype.size // 16 for a in (k_buffer, v_buffer)]
    width = min(sum(words), _WORDS)
    whole = -(-sum(words) // width) * width
    found: list[mx.array] = _APPEND(
        [k_buffer, v_buffer, k, v, length, _sizes(rows, k.shape[2], *words)],
        template={"T": k_buffer.dtype},
        grid=(whole, -(-rows // _ROWS) * _ROWS, batch * heads),
        threadgroup=(width, _ROWS, 1),
        output_shapes=[k_buffer.shape, v_buffer.shape],
    )
    return found


@cache
def _sizes(*sizes: int) -> mx.array:
    return mx.array(sizes, mx.int32)
