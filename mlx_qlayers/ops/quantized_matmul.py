"""Product with a quantized matrix: checks, and the choice between kernel and reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import mlx.core as mx

from ..formats import Format
from ..metal.quantized_matmul import (
    MAX_FEW_ROWS,
    PackedMatrix,
    few_rows,
    products_of_few_rows,
)
from ..reference import quantized_matmul as reference
from ..runtime.backend import backend, choose

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
# How many times as fast as the reference the host kernel is, for 1, 2, 4, 8 and 16 rows; measured
# by `benchmarks/bench_quantized_matmul.py --host`.
_HOST_GAIN = {
    ("affine", 1): (5.7, 9.4, 14.3, 15.5, 13.4),
    ("affine", 2): (4.7, 7.8, 11.6, 15.2, 11.6),
    ("affine", 3): (3.9, 6.1, 9.4, 13.4, 15.3),
    ("affine", 4): (4.4, 7.2, 11.1, 14.6, 10.5),
    ("affine", 5): (4.2, 6.1, 9.8, 13.7, 15.6),
    ("affine", 6): (3.5, 6.0, 9.3, 13.1, 15.3),
    ("affine", 8): (4.9, 7.7, 11.4, 14.7, 9.9),
    ("mxfp4", 4): (0.9, 1.5, 2.3, 3.6, 4.4),
    ("mxfp8", 8): (4.5, 7.8, 9.9, 9.1, 7.6),
    ("nvfp4", 4): (0.8, 1.1, 2.0, 2.8, 3.0),
}


def quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    bias: mx.array | None = None,
) -> mx.array:
    """Multiply with a quantized matrix, and add a bias.

    Takes the arguments and gives the results of ``mx.quantized_matmul``, rounded once from
    float32 sums.

    Args:
        x: (..., K) in float32, float16 or bfloat16; any strides, any number of rows.
        w: (N, K * bits / 32) uint32, or (K, N * bits / 32) if not ``transpose``; leading
            dimensions broadcast against those of ``x``.
        scales: one a group along the last axis of the matrix; floating point (affine), or uint8
            holding E8M0 (mxfp4, mxfp8) or E4M3 (nvfp4).
        biases: one a group (affine), else None.
        transpose: multiply with the transpose of the packed matrix.
        group_size: elements that share a scale; None stands for the mode's default (affine: 64).
        bits: bits an element; None stands for the mode's default (affine: 4).
        mode: ``"affine"``, ``"mxfp4"``, ``"mxfp8"`` or ``"nvfp4"``.
        bias: (N,) added to every row of the product.

    Returns:
        (..., N) in the dtype of ``x`` (affine: that of ``x`` and ``scales`` promoted).

    Raises:
        ValueError: an argument has a shape, dtype or value that does not fit; it is named.

    Example:
        >>> w, scales, biases = mx.quantize(mx.random.normal((128, 256)), group_size=64, bits=4)
        >>> quantized_matmul(mx.ones((3, 256)), w, scales, biases).shape
        (3, 128)

    Source: ``mx.quantized_matmul``.
    """
    fmt = Format.checked(group_size, bits, mode)
    _check(x, w, scales, biases, transpose, fmt, bias)
    rows = prod(x.shape[:-1])
    lacking = _lacking(rows, w, transpose)
    path = choose(
        "quantized_matmul",
        () if lacking else ("metal", "cuda", "host"),
        unless=lacking or _stock_is_better(),
        host_gain=_host_gain(rows, fmt),
        arrays=(x, w, scales),
    )
    if path == "ops":
        return _reference(x, w, scales, biases, bias, transpose, fmt)
    return _by_kernel(x, w, scales, biases, bias, path, fmt)


def _reference(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    bias: mx.array | None,
    transpose: bool,
    fmt: Format,
) -> mx.array:
    y = reference.quantized_matmul(x, w, scales, biases, transpose, fmt)
    return y if bias is None else y + bias


def _lacking(rows: int, w: mx.array, transpose: bool) -> str | None:
    """Why no kernel takes these arguments, if none does."""
    if not 0 < rows <= MAX_FEW_ROWS:
        return f"{rows} rows; the kernel takes 1 to {MAX_FEW_ROWS}"
    if not transpose:
        return "the kernel multiplies with the transpose"
    if w.ndim > 2 or 0 in w.shape:
        return f"w has shape {w.shape}; the kernel takes one matrix that is not empty"
    return None


def _stock_is_better() -> str | None:
    """Why ``auto`` leaves this kernel for the stock operator on a GPU."""
    return {
        "cuda": "the stock operator is faster here: 0.017 to 0.054 ms for one row of 3584 x 3584",
        "metal": "the kernel was not measured on an Apple GPU",
    }.get(backend())


def _host_gain(rows: int, fmt: Format) -> float | None:
    """The gain at the next smaller number of rows that was measured."""
    if not 0 < rows <= MAX_FEW_ROWS:
        return None
    return _HOST_GAIN[fmt.mode, fmt.bits][rows.bit_length() - 1]


def _by_kernel(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    bias: mx.array | None,
    path: str,
    fmt: Format,
) -> mx.array:
    out = x.dtype
    if biases is not None:
        out = mx.result_type(x, scales, biases)
        scales, biases = _alike(scales, biases)
    # A bias of more precision than the product is added to it afterwards, as stock layers do.
    fused = bias is not None and bias.dtype == out
    arrays = (x.astype(out), w, scales, biases, bias if fused else None)
    present = [a for a in arrays if a is not None]
    y: mx.array = _differentiable(path, fmt, biases is not None, fused)(*present)
    return y if bias is None or fused else y + bias


def _alike(scales: mx.array, biases: mx.array) -> tuple[mx.array, mx.array]:
    if scales.dtype == biases.dtype:
        return scales, biases
    dtype = mx.result_type(scales, biases)
    return scales.astype(dtype), biases.astype(dtype)


@cache
def _differentiable(path: str, fmt: Format, affine: bool, biased: bool) -> Callable[..., Any]:
    """The kernel with the gradient of the reference; takes the arrays that are not None."""

    def optional(rest: list[mx.array]) -> tuple[mx.array | None, mx.array | None]:
        return rest[0] if affine else None, rest[-1] if biased else None

    @mx.custom_function
    def product(x: mx.array, w: mx.array, scales: mx.array, *rest: mx.array) -> mx.array:
        k = x.shape[-1]
        config = few_rows(path, x.size // k, w.shape[0], k, x.dtype, fmt)
        matrix = PackedMatrix(w, scales, *optional(list(rest)))
        return products_of_few_rows(x, [matrix], fmt, config)[0]

    @product.vjp
    def gradient(arrays: tuple[mx.array, ...], dy: mx.array, y: mx.array) -> list[mx.array]:
        floats = [i for i, a in enumerate(arrays) if mx.issubdtype(a.dtype, mx.floating)]

        def function(*given: mx.array) -> mx.array:
            merged = list(arrays)
            for i, a in zip(floats, given, strict=True):
                merged[i] = a
            x, w, scales, *rest = merged
            return _reference(x, w, scales, *optional(rest), True, fmt)

        found = mx.vjp(function, [arrays[i] for i in floats], [dy])[1]
        gradients = [mx.zeros_like(a) for a in arrays]
        for i, d in zip(floats, found, strict=True):
            gradients[i] = d
        return gradients

    return product


def _check(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    transpose: bool,
    fmt: Format,
    bias: mx.array | None,
) -> None:
    if x.dtype not in _FLOATS:
        raise ValueError(f"x must be float32, float16 or bfloat16, not {x.dtype}")
    if x.ndim < 1 or w.ndim < 2:
        raise ValueError(
            f"x needs at least 1 dimension and w at least 2, not shapes {x.shape} and {w.shape}"
        )
    if problem := fmt.mismatch(w, scales, biases):
        raise ValueError(problem)
    dims = fmt.dims(w)
    inner, outer = (dims, w.shape[-2]) if transpose else (w.shape[-2], dims)
    if x.shape[-1] != inner:
        raise ValueError(
            f"x of shape {x.shape} must have {inner} columns to go with w of shape {w.shape} "
            f"(transpose={transpose}, group_size={fmt.group_size}, bits={fmt.bits})"
        )
    if bias is not None and bias.shape != (outer,):
        raise ValueError(f"bias must have shape ({outer},), not {bias.shape}")
