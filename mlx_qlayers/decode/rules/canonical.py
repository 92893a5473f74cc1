"""Rules that let the same computation look the same, however a model's code has it.

MLX spells out activations, and broadcasts that operations make by themselves.
"""

from __future__ import annotations

from functools import partial
from math import pi, sqrt

from ..graph import Node, P, Pattern, Rule

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


def _as(op: str, x: Node, root: Node) -> Node:
    return root.like(op, x)


UNBROADCAST: list[Rule] = [
    (Pattern(ELEMENTWISE), _unbroadcast),
    (P("(Broadcast | Reshape | AsType)(x)"), as_it_is),
]
_ERF = f"Erf(Divide(x, {sqrt(2)}))"
_TANH = f"Tanh(Multiply(Add(x, Multiply(Power(x, 3), 0.044715)), {sqrt(2 / pi)}))"
ACTIVATIONS: list[Rule] = [
    (P("Multiply(x, Sigmoid(x))"), partial(_as, "Silu")),
    (P(f"Divide(Multiply(x, Add({_ERF}, 1)), 2)"), partial(_as, "Gelu")),
    (P(f"Multiply(Multiply(x, 0.5), Add({_TANH}, 1))"), partial(_as, "GeluApprox")),
]
