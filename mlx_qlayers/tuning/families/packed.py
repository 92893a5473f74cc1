"""Products with a quantized matrix, as problems of the tuner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import NamedTuple

import mlx.core as mx

from ...formats import MODES, Format
from ...reference import quantized_matmul as reference
from ...runtime.tracing import Record
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
        mode, group, bits, order = problem.form.split("-")
        m, n, k = problem.shape
        return cls(m, n, k, Format(int(group), int(bits), mode), order == "t")

    @property
    def form(self) -> str:
        """The form of its problem."""
        fmt = self.fmt
        return f"{fmt.mode}-{fmt.group_size}-{fmt.bits}-{'t' if self.transpose else 'n'}"

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
        """The stock operator, and the dense product of what the stock operator dequantizes."""
        fmt, transpose = self.fmt, self.transpose

        def stock(inputs: list[mx.array]) -> mx.array:
            return mx.quantized_matmul(*four(inputs), transpose, *fmt)

        def dense(inputs: list[mx.array]) -> mx.array:
            x, w, scales, biases = four(inputs)
            matrix = mx.dequantize(w, scales, biases, *fmt).astype(x.dtype)
            return x @ (matrix.T if transpose else matrix)

        return {"stock": stock, "dequantized": dense}


def format_of(record: Record) -> tuple[Format, mx.Dtype]:
    """The format of a launch's matrix, and the dtype of its rows."""
    group, bits, mode = (int(record.template[name]) for name in ("group", "bits", "mode"))  # type: ignore[arg-type]
    dtype = record.template["T"]
    assert isinstance(dtype, mx.Dtype)
    return Format(group, bits, list(MODES)[mode]), dtype


def problem_of(record: Record) -> Problem:
    """The problem behind a launch of a kernel that takes x, w and scales first."""
    (fmt, dtype), (x, w) = format_of(record), record.input_shapes[:2]
    transpose = bool(record.template.get("transposed", True))
    n = w[0] if transpose else w[1] * 32 // fmt.bits
    packed = Packed(prod(x[:-1]), n, x[-1], fmt, transpose)
    return Problem((packed.m, n, packed.k), dtype, packed.form)


def four(inputs: list[mx.array]) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
    """x, w, scales and biases, which small floats have none of."""
    x, w, scales, *biases = inputs
    return x, w, scales, biases[0] if biases else None
