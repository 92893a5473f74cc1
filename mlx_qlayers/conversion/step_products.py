"""Products in the graph of a step that take what stands around them into their launch.

Whatever a model's code looks like: a product that is added to something is computed with that as
its residual. If the sum goes through an RMS norm, it gives what that needs as well, so that those
of the normalized rows take the norm in. What nobody needs any more is not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from ..metal.quantized_matmul.qmv import MAX_MATRICES
from ..ops.fused_products import ACTIVATIONS, defers_norm
from ..ops.quantized_route import in_one_launch
from .recorder import Node, Recorder

Latest = TypeVar("Latest", mx.array, mx.array | None)


class Normed(NamedTuple):
    """Rows behind an RMS norm, and what products take instead: rows, tile squares, epsilon."""

    y: mx.array
    x: mx.array
    tile_squares: mx.array
    eps: float


class HeadNorm(NamedTuple):
    """What an RMS norm of heads gave, of what, and how."""

    y: mx.array
    x: mx.array
    weight: mx.array | None
    eps: float


class Product(NamedTuple):
    """A product and its residual, and how it is computed otherwise.

    Attributes:
        again: with a residual and a weight behind it.
        parts: where rows of its matrix end that are matrices of their own, and a gate of two.
        defers: whether it takes the weight of a norm behind it.
    """

    y: mx.array
    again: Callable[[mx.array | None, mx.array | None], list[mx.array]]
    residual: mx.array | None
    parts: Callable[..., list[mx.array]] | None = None
    defers: bool = True


class Part(NamedTuple):
    """What a product was split into: which of the parts, and those of all."""

    y: mx.array
    number: int
    all: Callable[..., list[mx.array]]
    ends: tuple[int, ...]


class Products:
    """Norms and products of a step, by the identity of what they gave."""

    def __init__(self) -> None:
        self.norms: dict[int, Normed] = {}
        self.made: dict[int, Product] = {}
        self.instead: dict[int, tuple[mx.array, mx.array]] = {}
        self.split: dict[int, Part] = {}
        self.of_heads: dict[int, HeadNorm] = {}

    def keep(self, product: Product) -> None:
        """Keep how a product was made."""
        if in_one_launch(product.y):
            self.made[id(product.y)] = product

    def latest(self, x: Latest) -> Latest:
        """What takes the place of a product, so that it is not computed twice."""
        return self.instead.get(id(x), (x, x))[1]

    def deferring(self, x: mx.array, weight: mx.array | None) -> list[mx.array] | None:
        """What takes the place of a sum, and what defers its norm; None where that is not done."""
        made = self.made.get(id(x))
        if made is None or made.residual is None or weight is None or id(x) in self.instead:
            return None
        if not defers_norm(x):
            return None
        parts = made.again(made.residual, weight)
        self.instead[id(x)] = x, parts[0]
        return parts

    def added(self, recorder: Recorder, node: Node) -> mx.array | None:
        """For a sum with a product that product with a residual."""
        pairs = [(self.made.get(id(y)), y, other) for y, other in (node.args, node.args[::-1])]
        # Rather a residual of the one that a norm can follow.
        for made, y, other in sorted(pairs, key=lambda pair: not (pair[0] and pair[0].defers)):
            if made is None or not isinstance(other, mx.array) or id(y) in self.instead:
                continue
            before = recorder.node(other)
            if not made.defers and before and before.op == "mul":
                continue  # which MLX computes with this sum and the next in a launch
            inner = self.made.get(id(made.residual))
            if (other.shape, other.dtype) != (y.shape, y.dtype):
                continue
            if inner and inner.residual is None:  # a sum of two products
                (other,) = inner.again(other, None)
            elif made.residual is not None:
                continue
            (total,) = made.again(other, None)
            if made.defers:
                self.keep(Product(total, made.again, other))
            return total
        return None

    def splitted(self, x: Any, sections: Any, axis: int) -> list[mx.array] | None:
        """For the parts of a product those with the rows of its matrix that give them."""
        made = self.made.get(id(x))
        if made is None or made.parts is None or axis not in (-1, x.ndim - 1):
            return None
        width = x.shape[-1]
        if isinstance(sections, int):
            sections = [width // sections * i for i in range(1, sections)]
        ends = (*sections, width)
        if len(ends) > MAX_MATRICES:
            return None
        parts = made.parts(ends)
        self.split |= {id(y): Part(y, i, made.parts, ends) for i, y in enumerate(parts)}
        return parts

    def multiplied(self, recorder: Recorder, node: Node) -> mx.array | None:
        """For a part of a product times the activation of the other one gated product."""
        for y, up in (node.args, node.args[::-1]):
            active, second = recorder.node(y), self.split.get(id(up))
            first = self.split.get(id(active.args[0])) if active else None
            if active is None or first is None or second is None or active.op not in ACTIVATIONS:
                continue
            of_one = first.all is second.all and first.ends[0] * 2 == first.ends[-1]
            if of_one and (first.number, second.number) == (0, 1) and len(first.ends) == 2:
                (product,) = first.all(first.ends, active.op)
                return product
        return None

    def normed(
        self, norm: Callable[..., mx.array], x: mx.array, weight: mx.array | None, eps: float
    ) -> mx.array:
        """The RMS norm of ``x``, computed by a function, which products may take in."""
        if (parts := self.deferring(x, weight)) is None:
            y = norm(self.latest(x), weight, eps)
            if x.ndim == 4 and (weight is None or weight.dtype == x.dtype == y.dtype):
                self.of_heads[id(y)] = HeadNorm(y, x, weight, eps)
            return y
        y, rows, tile_squares = parts
        normalized = norm(y, weight, eps)
        self.norms[id(normalized)] = Normed(normalized, rows, tile_squares, eps)
        return normalized
