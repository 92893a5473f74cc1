"""Products in the graph of a step that take what stands around them into their launch.

Whatever a model's code looks like: a product that is added to something is computed with that as
its residual. If the sum goes through an RMS norm, it gives what that needs as well, so that those
of the normalized rows take the norm in. What nobody needs any more is not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from ..ops.fused_products import defers_norm
from ..ops.quantized_route import in_one_launch
from .recorder import Node, Recorder


class Normed(NamedTuple):
    """Rows behind an RMS norm, and what products take instead: rows, tile squares, epsilon."""

    y: mx.array
    x: mx.array
    tile_squares: mx.array
    eps: float


class Product(NamedTuple):
    """A product and its residual, and how it is computed with a residual and a weight behind it."""

    y: mx.array
    again: Callable[[mx.array | None, mx.array | None], list[mx.array]]
    residual: mx.array | None


class Products:
    """Norms and products of a step, by the identity of what they gave."""

    def __init__(self) -> None:
        self.norms: dict[int, Normed] = {}
        self.made: dict[int, Product] = {}
        self.instead: dict[int, tuple[mx.array, mx.array]] = {}

    def keep(self, product: Product) -> None:
        """Keep how a product was made."""
        if in_one_launch(product.y):
            self.made[id(product.y)] = product

    def latest(self, x: mx.array) -> mx.array:
        """What takes the place of a product, so that it is not computed twice."""
        return self.instead.get(id(x), (x, x))[1]

    def added(self, recorder: Recorder, node: Node) -> mx.array | None:
        """For a sum with a product that product with a residual."""
        for y, other in (node.args, node.args[::-1]):
            made = self.made.get(id(y))
            if made is None or not isinstance(other, mx.array) or id(y) in self.instead:
                continue
            inner = self.made.get(id(made.residual))
            if (other.shape, other.dtype) != (y.shape, y.dtype):
                continue
            if inner and inner.residual is None:  # a sum of two products
                (other,) = inner.again(other, None)
            elif made.residual is not None:
                continue
            (total,) = made.again(other, None)
            self.keep(Product(total, made.again, other))
            return total
        return None

    def normed(
        self, norm: Callable[..., mx.array], x: mx.array, weight: mx.array | None, eps: float
    ) -> mx.array:
        """The RMS norm of ``x``, computed by a function, which products may take in."""
        made = self.made.get(id(x))
        goes_on = made is not None and made.residual is not None and weight is not None
        if made is None or not goes_on or id(x) in self.instead or not defers_norm(x):
            return norm(self.latest(x), weight, eps)
        y, rows, tile_squares = made.again(made.residual, weight)
        self.instead[id(x)] = x, y
        normalized = norm(y, weight, eps)
        self.norms[id(normalized)] = Normed(normalized, rows, tile_squares, eps)
        return normalized
