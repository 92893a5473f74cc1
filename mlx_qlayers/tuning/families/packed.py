"""Products with a quantized matrix, as problems of the tuner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import mlx.core as mx

from ...formats import Format
from ...metal.quantized_matmul.dequantize import dequantize
from ...metal.quantized_matmul.qmv import PackedMatrix
from ...reference import quantized_matmul as reference
from ..family import Problem

Path = Callable[[list[mx.array]], mx.array]


class Packed(NamedTuple):
    """A product y (M, N) = x (M, K) with a packed matrix, read from a problem.

    Attributes:
        m, n, k: the shape.
        fmt: the matrix's format.
        transpose: whether it is multiplied with its transpose.
    """

    m: int
    n: int
    k: int
    fmt: Format
    transpose: bool

    @classmethod
    def of(cls, problem: Problem) -> Packed:
        """Read a problem whose shape is (M, N, K) and whose form is ``"affine-64-4-t"``."""
        mode, group, bits, order, *_ = problem.form.split("-")
        m, n, k = problem.shape
        return cls(m, n, k, Format(int(group), int(bits), mode), order == "t")

    def problem(self, dtype: mx.Dtype) -> Problem:
        """The problem that :meth:`of` reads."""
        group, bits, mode = self.fmt
        form = f"{mode}-{group}-{bits}-{'t' if self.transpose else 'n'}"
        return Problem((self.m, self.n, self.k), dtype, form)

    def part(self, dtype: mx.Dtype, n: int, m: int = 16) -> tuple[Problem, float]:
        """At most n columns and m rows of the product, and how many of them it has."""
        part = self._replace(m=min(self.m, m), n=min(self.n, n))
        return part.problem(dtype), self.m * self.n / (part.m * part.n)

    def inputs(self, dtype: mx.Dtype) -> list[mx.array]:
        """Random x, and w, scales and, in mode affine, biases."""
        shape = (self.n, self.k) if self.transpose else (self.k, self.n)
        x = mx.random.normal((self.m, self.k)).astype(dtype)
        w = (mx.random.normal(shape) * self.k**-0.5).astype(dtype)
        return [x, *mx.quantize(w, self.fmt.group_size, self.fmt.bits, mode=self.fmt.mode)]

    def reference(self, inputs: list[mx.array]) -> mx.array:
        """The product in float32."""
        x, w, scales, *biases = inputs
        dense = reference.dequantize(w, scales, biases[0] if biases else None, self.fmt)
        dense = dense.astype(mx.float32)
        return x.astype(mx.float32) @ (dense.T if self.transpose else dense)

    def paths(self) -> Mapping[str, Path]:
        """The stock operator, and the dense product that ``auto`` takes for many rows."""
        fmt, transpose = self.fmt, self.transpose

        def stock(inputs: list[mx.array]) -> mx.array:
            return mx.quantized_matmul(*four(inputs), transpose, *fmt)

        def dense(inputs: list[mx.array]) -> mx.array:
            x, w, scales, biases = four(inputs)
            matrix = dequantize([PackedMatrix(w, scales, biases)], fmt, x.dtype)
            return x @ (matrix.T if transpose else matrix)

        return {"stock": stock, "dequantized": dense}


def four(inputs: list[mx.array]) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
    """x, w, scales and biases, which small floats have none of."""
    x, w, scales, *biases = inputs
    return x, w, scales, biases[0] if biases else None
