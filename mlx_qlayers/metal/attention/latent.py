"""Launches attention of a token to latent rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ...measurements.thresholds import tabled
from ...runtime.devices import device_of
from ...runtime.devices.record import most_threads
from ...runtime.program import CONSTANT_BELOW
from ...runtime.spec import Spec
from ..common.kernels import LOG2E, strided_kernel, without, words
from .decode import attention_combine

# SIMD groups that add up the splits of a row.
_COMBINE = 8
# The widest latent rows: of those a thread holds its part of four queries.
_MAX_WIDTH = 512


def takes(q: Spec, r: Spec, rows: int) -> bool:
    """Whether the kernel takes queries (B, H, 1, D) and (B, H, 1, R) of so many rows."""
    width, rotated = q.shape[3], r.shape[3]
    fits = width % 32 == rotated % 32 == 0 and 0 < width <= _MAX_WIDTH and 0 < rotated <= width
    return fits and q.size > 0 and rows >= CONSTANT_BELOW


def splits_of(rows: int) -> int:
    """Into how many splits so many rows are cut."""
    of = tabled("latent_attention_splits", device=None if device_of().gpu else "host")
    return max(1, min(rows // of["rows"], of["most"]))


def _registers(D: int, R: int, heads: int, **_: object) -> int:
    return (heads + 2) * (D + R) // 32 + D // 32 + heads


def _heads(width: int, rotated: int) -> int:
    """Heads that a threadgroup takes: four, or as many as registers suffice for."""
    few = device_of().few_registers
    fitting = (n for n in (4, 2, 1) if width % (32 * n) == 0)
    return next(
        n for n in fitting if not few or most_threads(_registers(width, rotated, n)) >= 32 * n
    )


_MASKED = strided_kernel(
    "latent_step_masked",
    "attention/latent.metal",
    function="latent_step",
    threadgroup_memory=lambda heads, **_: 4 * 33 * heads,
    registers=_registers,
)
KERNEL = without(_MASKED, ("mask",), "latent_step")


def latent_step(
    q: Spec, r: Spec, c: Spec, mask: Spec | None, scale: float
) -> Callable[..., list[mx.array]]:
    """Binds attention to latent rows; the launch gives (B, H, 1, D)."""
    (batch, heads, _, width), rows = q.shape, c.shape[2]
    each = _heads(width, r.shape[3])
    splits = splits_of(rows)
    per_batch = mask is not None and mask.shape[0] > 1
    options = mx.array([*words(scale * LOG2E), splits, heads, rows, per_batch], mx.int32)
    parts = batch, 1, heads, splits, width + 2
    beside, seen = Spec((*c.shape[:3], r.shape[3]), c.dtype), [] if mask is None else [mask]
    launch = (KERNEL if mask is None else _MASKED).bind(
        [q, r, c, beside, Spec((), mx.int32), *seen, Spec.of(options)],
        template={
            "T": q.dtype,
            "O": q.dtype if splits == 1 else mx.float32,
            "D": width,
            "R": r.shape[3],
            "heads": each,
            "masked": mask is not None,
        },
        grid=(32 * each * splits, -(-heads // each), batch),
        threadgroup=(32 * each, 1, 1),
        output_shapes=[q.shape if splits == 1 else parts],
    )
    combine = attention_combine(parts, q.dtype, None, q.shape, _COMBINE) if splits > 1 else None

    def run(q: Any, r: Any, *rest: Any) -> list[mx.array]:
        # Queries have any strides; a cache seldom needs a copy.
        dense = [mx.contiguous(a) for a in rest if a is not None and a.ndim]
        outputs = launch([q, r, *dense[:2], rest[2], *dense[2:], options])
        return outputs if combine is None else combine(outputs)

    return run
