"""Launches the norm of rows that products of batch-invariant models take."""

from __future__ import annotations

from collections.abc import Callable
from struct import pack, unpack

import mlx.core as mx

from ...runtime.spec import Spec
from ..common.kernels import large_kernel

# Elements of a row at most, by threadgroup memory, and SIMD groups of a threadgroup.
MAX_WIDTH = 1 << 16
_MOST_SIMDS = 16

_ROWS = large_kernel(
    "norm_rows",
    "quantized_matmul/normed.metal",
    threadgroup_memory=lambda K, **_: 4 * -(-K // 16),
)


def norm_rows(x: Spec, epsilon: float) -> Callable[[mx.array, mx.array], mx.array]:
    """Binds x (..., K) and a weight (K,) to rows behind an RMS norm, K up to :data:`MAX_WIDTH`."""
    (*_, k), simds = x.shape, min(-(-x.shape[-1] // 32), _MOST_SIMDS)
    launch = _ROWS.bind(
        [x, Spec((k,), x.dtype)],
        template={
            "T": x.dtype,
            "K": k,
            "epsilon": unpack("i", pack("f", epsilon))[0],
            "simds": simds,
        },
        grid=(32 * simds * (x.size // k), 1, 1),
        threadgroup=(32 * simds, 1, 1),
        output_shapes=[x.shape],
    )
    return lambda *arrays: launch([*arrays])[0]
