"""Rules that let the same computation look the same, however a model's code has it.

MLX spells out activations, and broadcasts that operations make by themselves.
"""

from __future__ import annotations

from functools import partial
from math import pi, sqrt

import mlx.core as mx

from ..graph import Node, P, Pattern, Rule, under

ELEMENTWISE = (
    *("Add", "Subtract", "Multiply", "Divide", "Power", "Maximum", "Minimum", "Select"),
    *("Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd"),
    *("LogicalOr", "Remainder", "LogAddExp", "BitwiseBinary"),
)


def _unbroadcast(root: Node) -> Node | None:
    """An operation broadcasts by itself, where another operand has the shape of the result."""
    for i, source in enumerate(root.src):
        others = *root.src[:i], *root.src[i + 1 :]
        if source.op == "Broadcast" and any(s.shape == root.shape for s in others):
            src = (*root.src[:i], source.src[0], *root.src[i + 1 :])
            return Node(root.op, src, root.arg, root.outputs)
    return None


def as_it_is(x: Node, root: Node) -> Node | None:
    return x if x.outputs == root.outputs else None


def _scaled_or_shifted(norm: Node, array: Node, root: Node) -> Node | None:
    """A norm times a weight, or one plus a bias."""
    at, array = 1 if root.op == "Multiply" else 2, under(array)
    if norm.src[at] or array.shape != norm.shape[-1:] or array.dtype != root.dtype:
        return None
    src = (*norm.src[:at], array, *norm.src[at + 1 :])
    return root.like(norm.op, *src, arg=norm.arg)


def _as(op: str, x: Node, root: Node) -> Node:
    return root.like(op, x)


# Pairs that cancel: a cast to a wider type and back, an axis put in and taken out.
CANCELLED: list[Rule] = [
    (P("(Squeeze | ExpandDims)((Squeeze | ExpandDims)(x))"), as_it_is),
    (P("AsType(wide(x))", wide=Pattern(("AsType",), arg=(mx.float32,))), as_it_is),
]
UNBROADCAST: list[Rule] = [
    (Pattern(ELEMENTWISE), _unbroadcast),
    (P("(Broadcast | Reshape | AsType)(x)"), as_it_is),
]
NORMS: list[Rule] = [
    (P("Multiply(norm @ +(RMSNorm | LayerNorm), array)"), _scaled_or_shifted),
    (P("Add(norm @ +LayerNorm, array)"), _scaled_or_shifted),
]
_ERF = f"Erf(Divide(x, {sqrt(2)}))"
_TANH = f"Tanh(Multiply(Add(x, Multiply(Power(x, 3), 0.044715)), {sqrt(2 / pi)}))"
ACTIVATIONS: list[Rule] = [
    (P("Multiply(x, Sigmoid(x))"), partial(_as, "Silu")),
    (P(f"Divide(Multiply(x, Add({_ERF}, 1)), 2)"), partial(_as, "Gelu")),
    (P(f"Multiply(Multiply(x, 0.5), Add({_TANH}, 1))"), partial(_as, "GeluApprox")),
]
