"""Activations, as MLX spells them out: to one node each."""

from __future__ import annotations

import math

from ..graph import Node, P, Pattern, Rule


def number(value: float) -> Pattern:
    """A pattern of a constant, in any dtype."""

    def near(constant: object) -> bool:
        array = getattr(constant, "array", None)
        return getattr(array, "size", 0) == 1 and math.isclose(array.item(), value, rel_tol=1e-2)  # type: ignore[union-attr]

    constant = Pattern(("Constant",), arg=near)
    return P("c | AsType(c) | Broadcast(c)", c=constant)


def _as(op: str):  # type: ignore[no-untyped-def]
    def make(x: Node, root: Node) -> Node:
        return root.like(op, x)

    return make


_ONE, _TWO, _HALF = number(1), number(2), number(0.5)
_CUBIC = P("Add(x, Multiply(Power(x, n), a))", n=number(3), a=number(0.044715))
_TANH = P("Tanh(Multiply(cubic, a))", cubic=_CUBIC, a=number(math.sqrt(2 / math.pi)))
_ERF = P("Erf(Divide(x, root))", root=number(2**0.5))
ACTIVATIONS: list[Rule] = [
    (P("Multiply(x, Sigmoid(x))"), _as("Silu")),
    (P("Divide(Multiply(x, Add(erf, one)), two)", erf=_ERF, one=_ONE, two=_TWO), _as("Gelu")),
    (
        P("Multiply(Multiply(x, half), Add(tanh, one))", half=_HALF, tanh=_TANH, one=_ONE),
        _as("GeluApprox"),
    ),
]
