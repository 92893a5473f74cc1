"""Heads of a step's tokens: the rows that they are made of, and what is done to them on the way.

Attention takes queries and keys as rows, (B, L, H * D), and applies their norms and their rotary
embedding itself. A model's code reshapes and transposes heads in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx

from ...options import Rotation
from ..graph import Node, P, Pattern, Rule, Spec, Value

# The axes of (B, H, L, D) as (B, L, H, D), and back.
_TURN = 0, 2, 1, 3
# Of reciprocals of rates.
_MOST = Value(mx.array(1e30))
_IN_ORDER = "Reshape", "Flatten", "Unflatten", "Squeeze", "ExpandDims"


def keeps_order(node: Node) -> bool:
    """Whether a node gives the elements of its source in the same order."""
    if node.op in _IN_ORDER:
        return True
    if node.op != "Transpose":
        return False
    kept = [axis for axis in node.arg[0] if node.src[0].shape[axis] != 1]
    return kept == sorted(kept)


def views(node: Node) -> Iterator[Node]:
    """A node and those before it that have its elements in its order."""
    yield node
    while keeps_order(node):
        node = node.src[0]
        yield node


def _seen_anew(root: Node) -> Node | None:
    """An array that was reshaped and now has the shape again that it had."""
    if not keeps_order(root):
        return None
    before = [*views(root)][1:]
    same = next((each for each in before if each.shape == root.shape), None)
    if same is None and len(before) > 1:
        shape = root.arg if root.op == "Reshape" else (root.shape,)
        return Node("Reshape", (before[-1],), shape, root.outputs)
    return same


def _transposed_back(x: Node, inner: Node, root: Node) -> Node | None:
    """The source of two transpositions that cancel."""
    undone = [inner.arg[0][axis] for axis in root.arg[0]]
    return x if undone == sorted(undone) else None


VIEWS: list[Rule] = [
    (P("Transpose(inner @ Transpose(x))"), _transposed_back),
    (Pattern((*_IN_ORDER, "Transpose")), _seen_anew),
]


class Heads(NamedTuple):
    """The heads of a step's tokens: (B, H, L, D), or (B, L, H, D) if tokens are ``outside``."""

    node: Node
    tokens: int
    outside: bool = False

    def rows(self) -> Node:
        """Heads side by side, (B, L, H * D)."""
        in_order = self.outside or self.tokens == 1
        node = self.node if in_order else transposed_heads(self.node)
        batch, *others = node.shape
        return reshaped(node, (batch, self.tokens, prod(others) // self.tokens))

    def behind(self, op: str) -> tuple[Heads, Node | None]:
        """The heads that an operation takes and these are a view of, and the operation."""
        now, width = self, self.node.shape[-1]
        while now.node.op != op or now.node.shape[-1] != width:
            turns = now.node.op == "Transpose" and now.node.arg[0] == _TURN
            if not turns and not keeps_order(now.node):
                return self, None
            now = now._replace(node=now.node.src[0], outside=now.outside is not turns)
        return now._replace(node=now.node.src[0]), now.node


def reshaped(node: Node, shape: tuple[Any, ...]) -> Node:
    """The same elements in another shape."""
    return Node("Reshape", (node,), (shape,), (Spec(shape, node.dtype),))


def transposed_heads(node: Node) -> Node:
    """(B, H, L, D) as (B, L, H, D), or back."""
    if node.op == "Transpose" and node.arg[0] == _TURN:
        source: Node = node.src[0]
        return source
    shape = tuple(node.shape[axis] for axis in _TURN)
    return Node("Transpose", (node,), (_TURN,), (Spec(shape, node.dtype),))


def finite(freqs: Node | None) -> Node | None:
    """Reciprocals of rates as this package's kernels take them: infinite ones are none."""
    if freqs is None:
        return None
    most = Node("Constant", (), (_MOST,), (Spec((), mx.float32),))
    return Node("Minimum", (freqs, most), (), freqs.outputs)


class Rotated(NamedTuple):
    """Queries and keys as rows, and what attention does to both of them before they meet."""

    q: Node
    k: Node
    rotation: Rotation = Rotation(0)
    epsilon: float = 0.0
    freqs: Node | None = None
    norms: tuple[Node | None, Node | None] = (None, None)


def rotated(q: Node, k: Node, at: Callable[[Node | None], bool]) -> Rotated:
    """Queries and keys before the rotary embedding and norms that attention does as well."""
    of_q, of_k = (Heads(x, x.shape[2]) for x in (q, k))
    given = Rotated(of_q.rows(), of_k.rows())
    (of_q, one), (of_k, other) = of_q.behind("RoPE"), of_k.behind("RoPE")
    if one is not None and other is not None:
        if (one.arg, one.src[1:]) != (other.arg, other.src[1:]) or not at(one.src[1]):
            return given
        freqs = finite(one.src[2])
        given = Rotated(of_q.rows(), of_k.rows(), Rotation(*one.arg), freqs=freqs)
    elif one is not other:
        return given
    (of_q, one), (of_k, other) = of_q.behind("RMSNorm"), of_k.behind("RMSNorm")
    if one is None or other is None or one.arg != other.arg or None in (one.src[1], other.src[1]):
        return given
    weights = one.src[1], other.src[1]
    return given._replace(q=of_q.rows(), k=of_k.rows(), epsilon=one.arg[0], norms=weights)
