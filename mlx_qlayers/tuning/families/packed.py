"""Packed matrices, as problems of the tuner have them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx

from ...formats import Format
from ...metal.quantized_matmul.dequantize import dequantize
from ...metal.quantized_matmul.qmv import PackedMatrix
from ...runtime.spec import Spec
from ..family import Inputs, Path


def packed_matrix(shape: tuple[int, int], dtype: mx.Dtype, fmt: Format) -> list[mx.array]:
    """A random matrix: w, scales and, in mode affine, biases."""
    w = (mx.random.normal(shape) * max(shape) ** -0.5).astype(dtype)
    return [*mx.quantize(w, fmt.group_size, fmt.bits, mode=fmt.mode)]


def matrices(arrays: list[mx.array], count: int) -> list[PackedMatrix]:
    """So many matrices from their arrays, one behind the other."""
    each = len(arrays) // count
    return [PackedMatrix(*arrays[i * each : (i + 1) * each]) for i in range(count)]


def specs(arrays: Iterable[mx.array | None]) -> list[Any]:
    """The specs of those arrays that there are; None for the others."""
    return [None if a is None else Spec.of(a) for a in arrays]


def product(x: mx.array, matrix: PackedMatrix, transpose: bool, fmt: Format) -> mx.array:
    """The product by MLX's operator."""
    w, scales, biases, _ = matrix
    return mx.quantized_matmul(x, w, scales, biases, transpose, *fmt)


def dense_product(inputs: Inputs, transpose: bool, fmt: Format) -> Path:
    """The product of x with one matrix, which is dequantized first."""
    unpack = dequantize([PackedMatrix(*specs(inputs[1:]))], fmt, inputs[0].dtype)

    def run(inputs: Inputs) -> mx.array:
        dense = unpack(*inputs[1:])
        return inputs[0] @ (dense.T if transpose else dense)

    return run
