"""Gradients of the scales and biases of affine matrices: kernel or reference."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import mlx.core as mx

from ..formats import Format
from ..metal.quantized_matmul.gradients import gradient_of_scales_and_biases
from ..reference import quantized_matmul as reference
from ..runtime.backend import backend
from ..runtime.legacy import choose

# How many times as fast as the reference the kernel is on a CPU, at least: of all formats and 1 to
# 512 rows, 8 bits and one row; measured by `benchmarks/bench_gather_qmm.py --gradients`.
_HOST_GAIN = 2.0
# Rows up to which it is faster than the stock operators on an H200: 4.9 times with 16 rows, 1.2
# with 512, 0.9 with 768.
_UNTIL_ON_CUDA = 640

Pair = tuple[mx.array, mx.array]


def scales_and_biases(
    x: mx.array,
    dy: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array,
    fmt: Format,
    transpose: bool,
) -> Pair:
    """The gradients of ``scales`` and ``biases`` of an affine product.

    Args:
        x: (..., K), M rows of any leading dimensions.
        dy: (..., N) in the dtype of ``x``; the gradient of the product.
        w: (N, K * bits / 32) uint32, or (K, N * bits / 32) if not ``transpose``.
        scales: one scale a group.
        biases: one bias a group, in the dtype of ``scales``.
        fmt: group_size and bits of ``w``; its mode is affine.
        transpose: whether the product was one with the transpose of ``w``.

    Returns:
        Arrays in the shape and dtype of ``scales``, float32 sums rounded once. The kernel holds
        neither the dense matrix nor its gradient in memory.
    """
    lacking = None
    if w.ndim > 2 or 0 in (*w.shape, prod(x.shape[:-1])):
        lacking = f"w has shape {w.shape}, x {x.shape}; the kernel takes one product, not empty"
    path = choose(
        "quantized_matmul, gradient of scales and biases",
        () if lacking else ("metal", "cuda", "host"),
        unless=lacking or _left_to_stock(prod(x.shape[:-1]), x.dtype),
        host_gain=_HOST_GAIN,
        arrays=(x, dy, w, scales),
    )
    if path != "ops":
        return gradient_of_scales_and_biases(x, dy, w, scales, fmt, transpose, path)

    def product(s: mx.array, b: mx.array) -> mx.array:
        return reference.quantized_matmul(x, w, s, b, transpose, fmt)

    d_scales, d_biases = mx.vjp(product, [scales, biases], [dy])[1]
    return d_scales, d_biases


def _left_to_stock(rows: int, dtype: mx.Dtype) -> str | None:
    """Why ``auto`` leaves this kernel for the stock operators on a GPU."""
    if backend() == "metal":
        return "the kernel was not measured on an Apple GPU"
    # In float32 the stock operators multiply in TF32, which is not exact enough.
    if backend() == "cuda" and rows > _UNTIL_ON_CUDA and dtype != mx.float32:
        return "the stock operators, which hold the dense gradient, are faster with so many rows"
    return None


def one_by_one(both: Callable[..., Pair]) -> tuple[Callable[..., mx.array], ...]:
    """Two functions that give one array of a pair each, and compute the pair once for both.

    For :func:`~mlx_qlayers.ops.separate.separate_gradients`, which asks for one gradient at a time.
    """
    last: list[tuple[tuple[object, ...], Pair]] = []

    def once(*arguments: mx.array) -> Pair:
        if not last or any(a is not b for a, b in zip(last[0][0], arguments, strict=True)):
            last[:] = [(arguments, both(*arguments))]
        return last[0][1]

    return lambda *a: once(*a)[0], lambda *a: once(*a)[1]
