"""Quantized product in plain MLX operators: the oracle of the kernels, and the path without one.

On a GPU this is ``mx.quantized_matmul`` itself. On a CPU it is the fastest composition of stock
operators that computes in float32: stock half-precision loops convert every weight in software,
and every stock CPU operator runs on one core.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import mlx.core as mx

from ..formats import Format
from .cores import on_core, parts


def quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    transpose: bool,
    fmt: Format,
    dense_rows: int | None = None,
) -> mx.array:
    """``x @ w.T`` (or ``x @ w``) for a packed ``w``; arguments already checked.

    From ``dense_rows`` rows on a CPU dequantizes for a dense product; None for never.
    """
    out = x.dtype if biases is None else mx.result_type(x, scales, biases)
    n = w.shape[-2] if transpose else fmt.dims(w)
    if not x.size or not n:  # by which stock operators divide
        batch = mx.broadcast_shapes(x.shape[:-2], w.shape[:-2])
        return mx.zeros((*batch, *x.shape[:-1][-1:], n), out)
    if mx.default_device().type == mx.gpu:
        if w.ndim == 3 and x.ndim > 3 and mx.cuda.is_available():
            return by_matrix(x, w, scales, biases, transpose=transpose, fmt=fmt)
        return fmt.quantized_matmul(x, w, scales, biases, transpose)
    if w.ndim > 2:
        wide = x.astype(mx.float32)
        return fmt.quantized_matmul(wide, w, scales, biases, transpose).astype(out)
    rows = x.reshape(-1, x.shape[-1]).astype(mx.float32)
    dense = dense_rows is not None and rows.shape[0] >= dense_rows
    # The stock BLAS is twice as fast on row-major operands as on a transposed one.
    columns = mx.contiguous(rows.T) if dense and transpose else rows
    each = rows.size if transpose else rows.shape[0] * fmt.dims(w)
    products: list[mx.array] = []
    # Each core takes some of the rows of w, which are columns of the product or terms of its sums.
    for core, part in enumerate(parts(w.shape[0], each)):
        packed = w[part], scales[part], None if biases is None else biases[part]
        with on_core(core):
            given = columns if transpose else rows[:, part]
            if not dense:
                products.append(fmt.quantized_matmul(given, *packed, transpose))
            elif transpose:
                products.append(dequantize(*packed, fmt) @ given)
            else:
                products.append(given @ dequantize(*packed, fmt))
    if not transpose:
        y = reduce(mx.add, products)
    else:
        y = mx.concatenate(products, 0).T if dense else mx.concatenate(products, 1)
    return y.astype(out).reshape(*x.shape[:-1], -1)


def by_matrix(x: mx.array, *packed: Any, transpose: bool, fmt: Format) -> mx.array:
    """The product of (..., H, M, K) with H matrices: MLX on NVIDIA GPUs misreads broadcast ones."""
    *batch, heads, rows, width = x.shape
    x = x.reshape(-1, heads, rows, width).swapaxes(0, 1)
    y = fmt.quantized_matmul(x.reshape(heads, -1, width), *packed, transpose)
    y = y.reshape(len(y), -1, rows, y.shape[-1]).swapaxes(0, 1)
    return y.reshape(*batch, *y.shape[1:])


def dequantize(w: mx.array, scales: mx.array, biases: mx.array | None, fmt: Format) -> mx.array:
    """The dense float32 matrix that ``w`` stands for, computed in float32."""
    if biases is None:
        return fmt.dequantize(w, scales, None, dtype=mx.float32)
    return fmt.dequantize(w, scales.astype(mx.float32), biases.astype(mx.float32))
