"""Launches the kernel that unpacks a quantized matrix."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..formats import MODES, Format
from ..runtime.kernel import Kernel

# Rows of a thread: enough to have several words on their way from memory.
_COUNT = 4

_DEQUANTIZE = Kernel(
    "dequantize_matrix",
    "dequantize.metal",
    inputs=("w", "scales", "biases", "shape"),
    outputs=("y",),
    template=("T", "S", "mode", "group", "bits", "run", "count"),
    large=True,
)


def dequantize(
    w: mx.array, scales: mx.array, biases: mx.array | None, fmt: Format, dtype: mx.Dtype
) -> mx.array:
    """The dense matrix that a packed one stands for, computed in float32 and rounded once.

    Args:
        w: (rows, columns * bits / 32) uint32.
        scales: (rows, columns / group_size), floating point (affine) or uint8.
        biases: as ``scales`` (affine), else None.
        fmt: group_size, bits and mode.
        dtype: float32, float16 or bfloat16.

    Returns:
        (rows, columns) in ``dtype``.
    """
    rows, columns = w.shape[0], fmt.dims(w)
    run = _run(fmt.bits)
    across = columns // run
    (y,) = _DEQUANTIZE(
        [w, scales, scales if biases is None else biases, _shape(rows, columns)],
        template={
            "T": dtype,
            "S": scales.dtype,
            "mode": list(MODES).index(fmt.mode),
            "group": fmt.group_size,
            "bits": fmt.bits,
            "run": run,
            "count": _COUNT,
        },
        grid=(across, -(-rows // _COUNT), 1),
        threadgroup=(min(across, 256), 1, 1),
        output_shapes=[(rows, columns)],
    )
    return y


def _run(bits: int) -> int:
    """The fewest elements, of at least 8, that whole words hold."""
    return next(n for n in (8, 16, 32) if n * bits % 32 == 0)


@cache
def _shape(rows: int, columns: int) -> mx.array:
    return mx.array([rows, columns], mx.int32)
