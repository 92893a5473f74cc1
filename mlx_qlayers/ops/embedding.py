"""Rows of a quantized matrix, as an embedding takes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx

from ..dispatch import Operation, Plan, choose, dispatch, either
from ..formats import Format
from ..metal.quantized_matmul.dequantize import dequantize_rows
from ..options import PackedMatrix
from ..runtime.devices import device_of
from .signature import FLOATS, Signature


def quantized_rows(
    numbers: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
) -> mx.array:
    """Some rows of a quantized matrix, unpacked.

    This is one launch on NVIDIA GPUs and CPUs. Stock operators are four, and on the former MLX
    compiles three of them for each type of ``numbers`` that is new, for 3 s each.

    Args:
        numbers: (...) integers, which rows; those below 0 count from the end.
        w: (N, K * bits / 32) packed in uint32.
        scales: (N, K / group_size).
        biases: like ``scales``; None in modes other than ``"affine"``.
        group_size: elements that share a scale; None stands for the mode's default.
        bits: bits an element; None stands for the mode's default.
        mode: one of ``mx.quantize``, as ``"affine"`` or ``"mxfp4"``.

    Returns:
        (..., K), in the dtype that ``mx.dequantize`` gives.

    Raises:
        ValueError: the arrays do not fit the format, or ``numbers`` are no integers.

    Example:
        >>> w = mx.quantize(mx.random.normal((8, 64)), group_size=64, bits=4)
        >>> quantized_rows(mx.array([[2, 7]]), *w).shape
        (1, 2, 64)

    Source: ``mlx.nn.QuantizedEmbedding``.
    """
    arrays = numbers, w, scales, biases
    (rows,) = dispatch(QUANTIZED_ROWS, arrays, (group_size, bits, mode))
    return cast(mx.array, rows)


def _plan(arrays: Sequence[Any], group_size: int | None, bits: int | None, mode: str) -> Plan:
    fmt = Format.checked(group_size, bits, mode)
    numbers, w, scales, biases = arrays
    if problem := fmt.mismatch(w, scales, biases):
        raise ValueError(problem)
    _TAKES.check(numbers)
    dtype = mx.bfloat16 if biases is None else scales.dtype

    def composed(numbers: Any, w: Any, scales: Any, biases: Any) -> list[mx.array]:
        at = numbers if numbers.ndim else numbers[None]  # MLX unpacks matrices alone
        rows = fmt.dequantize(w[at], scales[at], None if biases is None else biases[at])
        return [rows if numbers.ndim else rows[0]]

    if not numbers.size:  # of which MLX unpacks nothing
        shape = *numbers.shape, fmt.dims(w)
        return Plan(None, lambda *_: [mx.zeros(shape, dtype)])
    whole = w.ndim == 2 and 0 not in w.shape and numbers.size < 2**16
    covered = whole and numbers.dtype in (mx.int32, mx.uint32)
    covered = covered and (biases is None or scales.dtype in FLOATS)
    device = device_of()
    if not ((device.stock_compiles or device.launches_at_once) and covered):
        return Plan(None, composed)  # elsewhere MLX's gathers are there at once
    matrix = PackedMatrix(w, scales, biases, None)
    bind = partial(dequantize_rows, numbers, matrix, fmt, dtype)
    return either(choose("quantized_rows"), composed, arrays, bind)


_TAKES = Signature("numbers: integer")
QUANTIZED_ROWS = Operation("quantized_rows", _plan)
