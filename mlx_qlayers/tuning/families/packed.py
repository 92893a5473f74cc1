"""Packed matrices, as problems of the tuner have them."""

from __future__ import annotations

import mlx.core as mx

from ...formats import Format
from ...metal.quantized_matmul.qmv import PackedMatrix


def packed_matrix(shape: tuple[int, int], dtype: mx.Dtype, fmt: Format) -> list[mx.array]:
    """A random matrix: w, scales and, in mode affine, biases."""
    w = (mx.random.normal(shape) * max(shape) ** -0.5).astype(dtype)
    return [*mx.quantize(w, fmt.group_size, fmt.bits, mode=fmt.mode)]


def matrices(arrays: list[mx.array], count: int) -> list[PackedMatrix]:
    """So many matrices from their arrays, one behind the other."""
    each = len(arrays) // count
    return [PackedMatrix(*arrays[i * each : (i + 1) * each]) for i in range(count)]


def product(x: mx.array, matrix: PackedMatrix, transpose: bool, fmt: Format) -> mx.array:
    """The product by MLX's operator."""
    w, scales, biases, _ = matrix
    return mx.quantized_matmul(x, w, scales, biases, transpose, *fmt)
