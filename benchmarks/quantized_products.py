"""Products with quantized matrices: their inputs and their errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

import mlx.core as mx
from harness import held

from mlx_qlayers import quantized_matmul
from mlx_qlayers.commands.example import Example
from mlx_qlayers.formats import Format

Packed = tuple[mx.array, mx.array, mx.array | None]
Product = Callable[[mx.array, Packed], mx.array]

# Copies of a matrix hold so many elements, which no cache does.
_ROTATED_ELEMENTS = 1 << 28
# Rows of x and columns of the matrix, as it is multiplied, that are verified.
_CHECKED_ROWS, _CHECKED_COLUMNS = 16, 128


class Case(NamedTuple):
    """One product."""

    shape: tuple[int, int]  # rows and columns of the packed matrix, unpacked
    rows: int  # of x
    # False for the gradient of x, which multiplies with the same matrix as it is.
    transpose: bool = True
    fmt: Format = Format(64, 4)  # of the matrix
    dtype: mx.Dtype = mx.bfloat16  # of x, and of the numbers of an affine matrix

    def __str__(self) -> str:
        return f"{self.name}, {self.fmt.mode} {self.fmt.bits}, M = {self.rows}"

    @property
    def name(self) -> str:
        """The matrix, and whether its gradient is meant."""
        return f"{'' if self.transpose else 'gradient '}{self.shape[0]} x {self.shape[1]}"

    @property
    def kind(self) -> str:
        """The dtype's name."""
        return str(self.dtype).removeprefix("mlx.core.")

    def x(self) -> mx.array:
        """The rows."""
        return _x(self.rows, self.shape[1 if self.transpose else 0], self.dtype)

    def copies(self) -> list[Packed]:
        """Matrices."""
        return _copies(self.shape, self.fmt, self.dtype)


@cache
def _x(rows: int, columns: int, dtype: mx.Dtype) -> mx.array:
    x = mx.random.normal((rows, columns), key=mx.random.key(rows)).astype(dtype)
    mx.eval(x)
    return x


@cache
def _copies(shape: tuple[int, int], fmt: Format, dtype: mx.Dtype) -> list[Packed]:
    """Random matrices of about unit products, as many as no cache holds."""
    n, k = shape
    mx.random.seed(n)
    copies: list[Packed] = []
    for _ in range(max(2, min(16, _ROTATED_ELEMENTS // (n * k)))):
        w = mx.random.randint(0, 2**32 - 1, (n, k * fmt.bits // 32), mx.uint32)
        groups = (n, k // fmt.group_size)
        if fmt.mode != "affine":
            # Exponents around 2^-6, in NVFP4 numbers around 2^-4; no codes that are not numbers.
            low, high = (16, 32) if fmt.mode == "nvfp4" else (119, 123)
            w = w & 0xBFBFBFBF if fmt.bits == 8 else w
            copies.append((w, mx.random.randint(low, high, groups, mx.uint8), None))
            continue
        scales = (mx.random.uniform(0.5, 1, groups) * 2**-fmt.bits * k**-0.5).astype(dtype)
        copies.append((w, scales, -(2 ** (fmt.bits - 1)) * scales))
    mx.eval(copies)
    return copies


def error(case: Case, ways: Iterable[Product]) -> float:
    """The largest error of some ways, over the largest number, in parts of the whole result."""
    x, packed = case.x(), case.copies()[0]
    step, rows = _Step(case), slice(None, None, max(1, case.rows // _CHECKED_ROWS))
    matrix = (a if a is None else step.of_matrix(a) for a in packed)
    given = dict(zip(("w", "scales", "biases"), matrix, strict=True))
    given |= {"x": x[rows], "transpose": case.transpose, **case.fmt._asdict()}
    call = Example(str(case), quantized_matmul, given, terms=x.shape[1], steps=1)
    return held(call, *(lambda way=way: step.of_result(way(x, packed)[rows]) for way in ways))


class _Step:
    """Every so many columns of a product; whole groups of them where they lie in groups."""

    def __init__(self, case: Case) -> None:
        (n, k), self.transpose = case.shape, case.transpose
        self.lines = n if case.transpose else k // case.fmt.group_size
        wide = 1 if case.transpose else case.fmt.group_size
        step = max(1, self.lines * wide // _CHECKED_COLUMNS)
        self.slice = slice(step // 2, None, step)

    def of_matrix(self, a: mx.array) -> mx.array:
        return a[self.slice] if self.transpose else self.of_result(a)

    def of_result(self, a: mx.array) -> mx.array:
        return a.reshape(len(a), self.lines, -1)[:, self.slice].reshape(len(a), -1)
