"""Quantized product in plain MLX operators: the oracle of the kernels, and the path without one.

On a GPU this is ``mx.quantized_matmul`` itself. On a CPU it is the fastest composition of stock
operators that computes in float32: stock half-precision loops convert every weight in software,
and every stock CPU operator runs on one core.
"""

from __future__ import annotations

from functools import reduce

import mlx.core as mx

from ..formats import Format
from .cores import on_core, parts

# Rows from which dequantizing and a dense product beat the packed product on a CPU, and the same
# for x @ w; measured by `benchmarks/bench_quantized_matmul.py --crossover`.
_NEVER = 1 << 30
_DENSE_FROM_ROWS = {
    ("affine", 1): 12,
    ("affine", 2): 10,
    ("affine", 3): 28,
    ("affine", 4): 10,
    ("affine", 5): 40,
    ("affine", 6): 56,
    ("affine", 8): 10,
    ("mxfp4", 4): _NEVER,
    ("mxfp8", 8): 4,
    ("nvfp4", 4): _NEVER,
}
_DENSE_FROM_ROWS_QVM = {
    ("affine", 1): 40,
    ("affine", 3): 12,
    ("affine", 5): 16,
    ("mxfp8", 8): 4,
}


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
    product = _transposed if transpose else _plain
    return product(rows, w, scales, biases, fmt).astype(out).reshape(*leading, -1)


def dequantize(w: mx.array, scales: mx.array, biases: mx.array | None, fmt: Format) -> mx.array:
    """The dense float32 matrix that ``w`` stands for, computed in float32."""
    if biases is None:
        return mx.dequantize(w, scales, None, *fmt, dtype=mx.float32)
    return mx.dequantize(w, scales.astype(mx.float32), biases.astype(mx.float32), *fmt)


def _transposed(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, fmt: Format
) -> mx.array:
    """(M, K) @ (N, K).T in float32; each core takes some of the N rows of ``w``."""
    n = w.shape[0]
    dense = x.shape[0] >= _DENSE_FROM_ROWS[fmt.mode, fmt.bits]
    # The stock BLAS is twice as fast on row-major operands as on a transposed one.
    columns = mx.contiguous(x.T) if dense else None
    products = []
    for core, part in enumerate(parts(n, x.size)):
        packed = w[part], scales[part], None if biases is None else biases[part]
        with on_core(core):
            if columns is None:
                products.append(mx.quantized_matmul(x, *packed, True, *fmt))
            else:
                products.append(dequantize(*packed, fmt) @ columns)
    return mx.concatenate(products, 1) if columns is None else mx.concatenate(products, 0).T


def _plain(
    x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None, fmt: Format
) -> mx.array:
    """(M, K) @ (K, N) in float32; each core takes some of the K rows of ``w``."""
    (m, k), n = x.shape, fmt.dims(w)
    dense = m >= _DENSE_FROM_ROWS_QVM.get((fmt.mode, fmt.bits), _NEVER)
    terms = []
    for core, part in enumerate(parts(k, m * n)):
        packed = w[part], scales[part], None if biases is None else biases[part]
        with on_core(core):
            if dense:
                terms.append(x[:, part] @ dequantize(*packed, fmt))
            else:
                terms.append(mx.quantized_matmul(x[:, part], *packed, False, *fmt))
    return reduce(mx.add, terms)
