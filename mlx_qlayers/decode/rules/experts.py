"""Mixtures of experts: what is made of products with chosen matrices, and their sum by scores.

An ``Experts`` node takes rows (..., K), or (..., J, K), the experts (..., J) of each, tile squares
and four arrays of each of one or two matrices. Its arguments are group size, bits, mode, a gate and
the epsilon of a norm. A ``Combined`` node takes rows (..., J, K), experts, scores, four arrays of a
matrix and a residual.
"""

from __future__ import annotations

from math import inf

import mlx.core as mx

from ...options import Clipped
from ..graph import Node, P, Pattern, Rule, Spec, fits
from .canonical import as_it_is
from .products import GATES

_LIMITED = P("Minimum(gate @ Experts, -limit) | gate @ Experts")
_CLIPPED = P("Minimum(Maximum(up @ Experts, -least), -most) | up @ Experts")
_SHIFTED = P("Add(up, -shift) | up", up=_CLIPPED)
_SWISH = P("Multiply(g, Sigmoid(Multiply(g, -alpha)))")
# The numbers of patterns where the model's code has none.
_NUMBERS = {"limit": inf, "alpha": 1.0, "shift": 0.0, "most": inf, "least": -inf}


def _gated(first: Node, second: Node, root: Node) -> Node | None:
    """The activation of products, which may be clipped, times others of the same rows, likewise."""
    swish = fits(_SWISH, first) or {}
    name = "silu" if swish else GATES.get(first.op)
    gates = fits(_LIMITED, swish.get("g", first.src[0])) if name else None
    ups = fits(_SHIFTED, second) if gates else None
    if gates is None or ups is None:
        return None
    found = gates | ups | swish
    *clip, most, least = (found.get(name, number) for name, number in _NUMBERS.items())
    gate, up = found["gate"], found["up"]
    plain = len(gate.src) == len(up.src) == 7 and gate.arg == up.arg and gate.arg[3] is None
    if not plain or gate.src[:3] != up.src[:3] or gate.outputs != up.outputs:
        return None
    clipped = clip != [inf, 1.0, 0.0]
    if most != clip[0] or least != -most or (clipped and name != "silu"):
        return None
    arg = (*gate.arg[:3], Clipped(*clip) if clipped else name, gate.arg[4])
    return Node("Experts", (*gate.src, *up.src[3:]), arg, gate.outputs)


def _combined(y: Node, scores: Node, wide: Node, sum: Node, root: Node) -> Node | None:
    """The sum of products by scores, in their dtype."""
    single = len(y.src) == 7 and len(y.src[0].shape) == len(y.shape)
    axis = len(y.shape) - 2
    if not single or sum.arg != (2, (axis,)) or scores.shape != y.shape[:-1]:
        return None
    if wide.arg != ((axis + 1,),):
        return None
    rows, experts, _, *matrix = y.src
    src, spec = (rows, experts, scores, *matrix, None), Spec(root.shape, y.dtype)
    total = Node("Combined", src, y.arg[:3], (spec,))
    return total if root.dtype == y.dtype else root.like("AsType", total, arg=(root.dtype,))


def _added(y: Node, other: Node, root: Node) -> Node | None:
    """A sum by scores that is added to something; not what MLX computes with the next sum."""
    fit = y.src[-1] is None and other.op != "Multiply" and y.outputs == other.outputs
    if not fit or y.outputs != root.outputs:
        return None
    return root.like("Combined", *y.src[:-1], other, arg=y.arg)


def _through(y: Node, other: Node, root: Node) -> Node | None:
    """A product with a sum by scores as its residual, that is added to something."""
    inner = y.src[3]
    if inner is None or inner.op != "Combined" or len(y.outputs) > 1:
        return None
    residual = _added(inner, other, root)
    return residual and root.like("Products", *y.src[:3], residual, *y.src[4:], arg=y.arg)


EXPERTS: list[Rule] = [(P("Multiply(first, second)"), _gated)]
_SCALED = P("Multiply(~AsType(y @ +Experts), ~AsType(wide @ ExpandDims(scores)))")
COMBINED: list[Rule] = [(P("Squeeze(sum @ Reduce(scaled))", scaled=_SCALED), _combined)]
_FLOAT32 = Pattern(("AsType",), arg=lambda dtype: dtype == mx.float32)
COMBINED += [(P("AsType(wide(x))", wide=_FLOAT32), as_it_is)]
# Behind the rules of products.
RESIDUAL: list[Rule] = [
    (P("Add(y @ +Combined, other)"), _added),
    (P("Add(y @ +Products, other)"), _through),
]
