"""Activations, as MLX spells them out: to one node each."""

from __future__ import annotations

import math

from ..graph import Either, Node, P, Pattern, Rule, any_


def number(value: float) -> Either:
    """A pattern of a constant, in any dtype."""

    def near(constant: object) -> bool:
        array = getattr(constant, "array", None)
        return getattr(array, "size", 0) == 1 and math.isclose(array.item(), value, rel_tol=1e-2)  # type: ignore[union-attr]

    constant = Pattern(("Constant",), (), arg=near)
    return Either((constant, P("AsType", constant), P("Broadcast", constant)))


def _as(op: str):  # type: ignore[no-untyped-def]
    def make(x: Node, root: Node) -> Node:
        return root.like(op, x)

    return make


_X = any_("x")
_CUBIC = P("Add", _X, P("Multiply", P("Power", _X, number(3)), number(0.044715)))
ACTIVATIONS: list[Rule] = [
    (P("Multiply", _X, P("Sigmoid", _X)), _as("Silu")),
    (
        P(
            "Divide",
            P("Multiply", _X, P("Add", P("Erf", P("Divide", _X, number(2**0.5))), number(1))),
            number(2),
        ),
        _as("Gelu"),
    ),
    (
        P(
            "Multiply",
            P("Multiply", _X, number(0.5)),
            P(
                "Add",
                P("Tanh", P("Multiply", _CUBIC, number(math.sqrt(2 / math.pi)))),
                number(1),
            ),
        ),
        _as("GeluApprox"),
    ),
]
