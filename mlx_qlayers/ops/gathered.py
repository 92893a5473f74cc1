"""Gathered products by kernel, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, cast

import mlx.core as mx

from ..formats import GLOBAL_UNIT, Format
from ..metal.gather_qmm.gather_qmm import gather_qmm_config, gather_qmm_sorted
from ..metal.gather_qmm.gather_qmv import Choice, configuration, gather_qmv
from .legacy import gradient_of_scales_and_biases, one_by_one
from .separate import separate_gradients

# The product that the gradient of x is: of rows, packed matrices and their numbers.
Back = Callable[..., mx.array]


@dataclass(frozen=True)
class Gathered:
    """Products of one kind as a function of arrays: x, w, scales and those that it has.

    These come next: biases, one global scale a matrix, the matrices that the products take, and the
    blocks of rows.

    Attributes:
        path: the backend of the kernels.
        fmt: group_size, bits and mode of the matrices.
        transpose: whether they are multiplied transposed.
        share: neighbouring products that take the same block of rows; 0 where blocks are listed.
        in_order: whether the matrices that the products take are sorted.
        affine: whether there are biases.
        scaled: whether there are global scales.
        back: computes the product of which the gradient of x is made, as ``gather_qmm`` does.
    """

    path: str
    fmt: Format
    transpose: bool
    share: int
    in_order: bool
    affine: bool
    scaled: bool
    back: Back

    def __call__(self, *arrays: mx.array) -> mx.array:
        """(P, M, N), differentiable in all that are floating-point."""
        if self.path != "host":
            return _lazily(self)(*arrays)
        # Launches run at once: what has a gradient is told apart from what has none.
        floats = [0, *range(2, 4)] if self.affine else [0, 3] if self.scaled else [0]

        def all_of(given: tuple[mx.array, ...]) -> list[mx.array]:
            merged = list(arrays)
            for i, a in zip(floats, given, strict=True):
                merged[i] = a
            return merged

        def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given: function(*all_of(given[:-1]), given[-1])

        function = separate_gradients(
            lambda *given: self.forward(*all_of(given)),
            gradient(self.of_x),
            *(one_by_one(gradient(self.of_numbers)) if self.affine else ()),
            *((gradient(self.of_global),) if self.scaled else ()),
        )
        return function(*(arrays[i] for i in floats))

    def forward(self, *arrays: mx.array) -> mx.array:
        x, w, scales = arrays[:3]
        biases = arrays[3] if self.affine else None
        factors = arrays[3].flatten() / GLOBAL_UNIT if self.scaled else None
        return self._product(x, w, scales, biases, factors, self._choice(arrays))

    def of_x(self, *arrays: mx.array) -> mx.array:
        x, w, scales, *_, dy = arrays
        choice = self._choice(arrays[:-1])
        right, left, share, in_order = choice
        if left is not None or share > 1:  # terms are added up before they are rounded
            dy = dy.astype(mx.float32)
        terms = self.back(
            dy,
            w,
            scales,
            arrays[3] if self.affine else None,
            None,
            right,
            transpose=not self.transpose,
            **self.fmt._asdict(),
            global_scale=arrays[3] if self.scaled else None,
            sorted_indices=in_order,
        )
        if left is not None:
            total = mx.zeros((prod(x.shape[:-2]), *x.shape[-2:]), mx.float32)
            terms = total.at[left].add(terms)
        elif share > 1:
            terms = terms.reshape(-1, share, *terms.shape[-2:]).sum(1)
        return terms.astype(x.dtype).reshape(x.shape)

    def of_numbers(self, *arrays: mx.array) -> tuple[mx.array, mx.array]:
        """The gradients of scales and biases."""
        x, w, scales, *_, dy = arrays
        rows = _rows_by_matrix(self._choice(arrays[:-1]), prod(w.shape[:-2]), x.shape[-2])
        return gradient_of_scales_and_biases(
            x, dy, w, scales, self.fmt, self.transpose, self.path, rows
        )

    def of_global(self, *arrays: mx.array) -> mx.array:
        x, w, scales, given, *_, dy = arrays
        choice = self._choice(arrays[:-1])
        y = self._product(x.astype(mx.float32), w, scales, None, None, choice)
        each = (y * dy.astype(mx.float32)).sum((-2, -1)) / GLOBAL_UNIT
        return mx.zeros((given.size,)).at[choice.right].add(each).reshape(given.shape)

    def _choice(self, arrays: tuple[mx.array, ...]) -> Choice:
        right, *left = arrays[3 + self.affine + self.scaled :]
        return Choice(right, left[0] if left else None, self.share or 1, self.in_order)

    def _product(
        self,
        x: mx.array,
        w: mx.array,
        scales: mx.array,
        biases: mx.array | None,
        factors: mx.array | None,
        choice: Choice,
    ) -> mx.array:
        rows, matrices = choice.right.size * x.shape[-2], prod(w.shape[:-2])
        if self.in_order and self.path != "host" and rows >= matrices:
            cut = gather_qmm_config(self.path, rows, matrices, x.dtype, self.fmt)
            return gather_qmm_sorted(
                choice.blocks(x),
                w,
                scales,
                biases,
                factors,
                choice.right,
                self.transpose,
                self.fmt,
                cut,
            )
        config = configuration(self.path, x.shape[-2], self.in_order, self.transpose, self.fmt)
        return gather_qmv(x, w, scales, biases, factors, choice, self.fmt, config)


@cache
def _lazily(products: Gathered) -> Callable[..., mx.array]:
    """The products where launches are lazy: gradients that nobody asks for are never computed."""
    function = mx.custom_function(products.forward)

    @function.vjp
    def _(arrays: tuple[mx.array, ...], dy: mx.array, y: mx.array) -> list[mx.array]:
        found = [mx.zeros_like(a) for a in arrays]
        found[0] = products.of_x(*arrays, dy)
        if products.affine:
            found[2:4] = products.of_numbers(*arrays, dy)
        if products.scaled:
            found[3] = products.of_global(*arrays, dy)
        return found

    return cast(Callable[..., mx.array], function)


def _rows_by_matrix(
    choice: Choice, matrices: int, per_pair: int
) -> tuple[mx.array, mx.array, mx.array]:
    """The rows of x and of the result that met each matrix, and where each matrix's begin."""
    order = mx.argsort(choice.right)
    blocks = order // choice.share if choice.left is None else choice.left[order]
    x_rows, y_rows = (
        (at[:, None] * per_pair + mx.arange(per_pair)).flatten().astype(mx.uint32)
        for at in (blocks, order)
    )
    counts = mx.zeros((matrices + 1,), mx.uint32).at[choice.right + 1].add(per_pair)
    return x_rows, y_rows, mx.cumsum(counts).astype(mx.uint32)
