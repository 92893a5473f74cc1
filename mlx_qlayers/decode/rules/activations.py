"""Activations, as MLX spells them out: to one node each."""

from __future__ import annotations

import math
from functools import partial

from ..graph import Node, P, Rule


def _as(op: str, x: Node, root: Node) -> Node:
    return root.like(op, x)


_ERF = f"Erf(Divide(x, {math.sqrt(2)}))"
_TANH = f"Tanh(Multiply(Add(x, Multiply(Power(x, 3), 0.044715)), {math.sqrt(2 / math.pi)}))"
ACTIVATIONS: list[Rule] = [
    (P("Multiply(x, Sigmoid(x))"), partial(_as, "Silu")),
    (P(f"Divide(Multiply(x, Add({_ERF}, 1)), 2)"), partial(_as, "Gelu")),
    (P(f"Multiply(Multiply(x, 0.5), Add({_TANH}, 1))"), partial(_as, "GeluApprox")),
]
