"""Quantized product in plain MLX operators: the oracle of the kernels, and the path without one.

On a GPU this is ``mx.quantized_matmul`` itself. On a CPU it is the fastest composition of stock
operators that computes in float32: stock half-precision loops convert every weight in software,
and every stock CPU operator runs on one core.
"""

from __future__ import annotations

import os
from functools import cache
from itertools import pairwise

import mlx.core as mx

from ..formats import Format

# Rows from which dequantizing and a dense product beat the packed product on a CPU, and the same
# for the untransposed product; measured by `benchmarks/bench_quantized_matmul.py --crossover`.
_NEVER = 1 << 30
_DENSE_FROM_ROWS = {
    ("affine", 1): 12,
    ("affine", 2): 8,
    ("affine", 3): 24,
    ("affine", 4): 14,
    ("affine", 5): 36,
    ("affine", 6): 40,
    ("affine", 8): 14,
    ("mxfp4", 4): _NEVER,
    ("mxfp8", 8): 4,
    ("nvfp4", 4): _NEVER,
}
_DENSE_FROM_ROWS_UNTRANSPOSED = {("affine", 3): 12, ("affine", 5): 16, ("mxfp8", 8): 4}
# Multiply-adds below which handing a part to another core costs more than it saves.
_MIN_WORK_PER_PART = 1 << 18


def quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    transpose: bool,
    fmt: Format,
) -> mx.array:
    """``x @ w.T`` (or ``x @ w``) for a packed ``w``; arguments already checked.

    Args:
        x: (..., K) float array.
        w: packed uint32 weights of logical shape (N, K), or (K, N) if not ``transpose``.
        scales: one scale a group along the last axis of ``w``.
        biases: one bias a group (affine), else None.
        transpose: whether ``w`` is used transposed.
        fmt: group_size, bits and mode of ``w``.

    Returns:
        (..., N) in the dtype that ``mx.quantized_matmul`` gives.
    """
    out = x.dtype if biases is None else mx.result_type(x, scales, biases)
    if x.size == 0:  # stock operators divide by the number of rows
        batch = mx.broadcast_shapes(x.shape[:-2], w.shape[:-2])
        columns = w.shape[-2] if transpose else fmt.dims(w)
        return mx.zeros((*batch, *x.shape[:-1][-1:], columns), out)
    if mx.default_device().type == mx.gpu:
        return mx.quantized_matmul(x, w, scales, biases, transpose, *fmt)
    if w.ndim > 2:
        wide = x.astype(mx.float32)
        return mx.quantized_matmul(wide, w, scales, biases, transpose, *fmt).astype(out)
    leading = x.shape[:-1]
    rows = x.reshape(-1, x.shape[-1]).astype(mx.float32)
    product = _transposed if transpose else _untransposed
    return product(rows, w, scales, biases, fmt).astype(out).reshape(*leading, -1)


def dequantize(
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    fmt: Format,
    stream: mx.ThreadLocalStream | None = None,
) -> mx.array:
    """The dense float32 matrix that ``w`` stands for, computed in float32."""
    if biases is None:
        return mx.dequantize(w, scales, None, *fmt, dtype=mx.float32, stream=stream)
    scales, biases = (a.astype(mx.float32, stream=stream) for a in (scales, biases))
    return mx.dequantize(w, scales, biases, *fmt, stream=stream)


def _transposed(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, fmt: Format
) -> mx.array:
    """(M, K) @ (N, K).T in float32; each core takes some of the N rows of ``w``."""
    m, n = x.shape[0], w.shape[0]
    dense = m >= _DENSE_FROM_ROWS[fmt.mode, fmt.bits]
    # The stock BLAS is twice as fast on row-major operands as on a transposed one.
    columns = mx.contiguous(x.T) if dense else None
    parts = []
    for i, part in enumerate(_parts(n, m * x.size // max(m, 1))):
        stream = _stream(i)
        packed = _rows(part, n, w, scales, biases)
        if columns is None:
            parts.append(mx.quantized_matmul(x, *packed, True, *fmt, stream=stream))
        else:
            parts.append(mx.matmul(dequantize(*packed, fmt, stream), columns, stream=stream))
    if columns is None:
        return _join(parts, axis=1)
    return _join(parts, axis=0).T


def _untransposed(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, fmt: Format
) -> mx.array:
    """(M, K) @ (K, N) in float32; each core takes some of the K rows of ``w``."""
    (m, k), n = x.shape, scales.shape[1] * fmt.group_size
    dense = m >= _DENSE_FROM_ROWS_UNTRANSPOSED.get((fmt.mode, fmt.bits), _NEVER)
    total = None
    for i, part in enumerate(_parts(k, m * n)):
        stream = _stream(i)
        packed = _rows(part, k, w, scales, biases)
        columns = x if part == slice(0, k) else x[:, part]
        if dense:
            y = mx.matmul(columns, dequantize(*packed, fmt, stream), stream=stream)
        else:
            y = mx.quantized_matmul(columns, *packed, False, *fmt, stream=stream)
        total = y if total is None else total + y
    assert total is not None
    return total


def _rows(
    part: slice, count: int, *arrays: mx.array | None
) -> tuple[mx.array, mx.array, mx.array | None]:
    """The same rows of the packed weights, the scales and the biases; without a copy."""
    if part == slice(0, count):
        return arrays  # type: ignore[return-value]
    return tuple(None if a is None else a[part] for a in arrays)  # type: ignore[return-value]


def _join(parts: list[mx.array], axis: int) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis)


def _parts(count: int, work_per_row: int) -> list[slice]:
    """Split ``count`` rows evenly over the cores, but not into parts too small to pay."""
    n = max(1, min(_cores(), count * work_per_row // _MIN_WORK_PER_PART, count))
    edges = [count * i // n for i in range(n + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


@cache
def _cores() -> int:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(count or 1, 8)


@cache
def _stream(core: int) -> mx.ThreadLocalStream | None:
    """A stream that runs beside the caller's; part 0 stays on the caller's own."""
    return None if core == 0 else mx.new_thread_local_stream(mx.cpu)
