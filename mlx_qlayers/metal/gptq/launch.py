"""Launches the kernels of ``gptq.metal``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ...runtime.spec import Spec
from ..common.kernels import large_kernel

BLOCK = 128
SEARCH = 24
_FILE = "gptq/gptq.metal"
_BLOCK = large_kernel("gptq_block", _FILE, registers=16)
_FIXED = large_kernel("gptq_fixed_block", _FILE, registers=12)


def gptq_block(
    w: Spec, group_size: int, bits: int, dtype: mx.Dtype
) -> Callable[[mx.array, mx.array], list[mx.array]]:
    """Binds GPTQ of W (batch, N, 128) by U (batch, 128, 128): codes, errors, scales and biases."""
    batch, n, _ = w.shape
    rows, groups = mx.array(n), (batch, n, BLOCK // group_size)
    launch = _BLOCK.bind(
        [w, Spec((batch, BLOCK, BLOCK), mx.float32), rows],
        template={"T": dtype, "BITS": bits, "GROUP": group_size, "SEARCH": SEARCH},
        output_shapes=[w.shape, w.shape, groups, groups],
        **_threads(w),
    )
    return lambda w, u: launch([w, u, rows])


def gptq_fixed_block(w: Spec, bits: int) -> Callable[..., list[mx.array]]:
    """The same with scales and biases (batch, N, 128) in float32 as further arguments."""
    batch, n, _ = w.shape
    rows = mx.array(n)
    launch = _FIXED.bind(
        [w, Spec((batch, BLOCK, BLOCK), mx.float32), w, w, rows],
        template={"BITS": bits},
        output_shapes=[w.shape, w.shape],
        **_threads(w),
    )
    return lambda w, u, scales, biases: launch([w, u, scales, biases, rows])


def _threads(w: Spec) -> Any:
    """A SIMD group for each row."""
    rows = w.shape[0] * w.shape[1]
    return {"grid": (32 * rows, 1, 1), "threadgroup": (32 if rows % 4 else 128, 1, 1)}
