"""Steps of batch-invariant models: the operations that prompts are computed by, or their bits.

``Products`` round each product before a gate or a residual. ``Swiglu`` nodes are mlx-lm's function,
with tensor cores by this package's operation. An ``AttentionFrom`` node takes what an ``Attention``
node does, and the number of rows ahead of each sequence, or None. ``GatheredProduct`` nodes are
MLX's ``GatherQMM``, by this package's operation.
"""

from __future__ import annotations

import mlx.core as mx

from ...runtime.devices import device_of
from ..capture import Unsupported
from ..graph import Graph, Node, P, Pattern, Rule, rewrite
from .attention import ATTENTION
from .attention_step import BATCHES, TracedCaches
from .canonical import FAST, UNBROADCAST
from .padded import PaddedGraph, padded
from .products import PRODUCT, ROUNDED, side_by_side
from .rotary import ROTARY


def _gathered(root: Node) -> Node:
    return root.like("GatheredProduct", *root.src, arg=root.arg)


def _swiglu(act: Node, gate: Node, up: Node, root: Node) -> Node | None:
    """The function as a twin has it: with a sigmoid ahead of what it is multiplied by."""
    alike = gate.outputs == up.outputs and act.src[0] is not gate and root.src[0] is act
    return root.like("Swiglu", gate, up) if alike else None


_GATHERED: list[Rule] = [(P("GatherQMM"), _gathered)]
# That of experts is an empty module, which all models share and nobody changes.
_DENSE = Pattern(("Products", "Item"), name="gate")
_SWIGLU: list[Rule] = [
    (P("Multiply(act @ Multiply(gate, Sigmoid(gate)), up)", gate=_DENSE), _swiglu)
]


def _scale(attention: Node) -> float:
    """The scale of scores as a model's code has it: what MLX spells out has it in q's dtype."""
    scale, q = attention.arg[0], attention.src[0]
    usual: float = q.shape[-1] ** -0.5
    return usual if mx.array(usual, q.dtype).item() == scale else scale


def invariant(graph: Graph, caches: TracedCaches) -> PaddedGraph:
    """A captured step with positions as an array, whose rows have the bits of those of prompts.

    Raises:
        Unsupported: something takes positions or paddings in a way that is not known.
    """
    gates = _SWIGLU if device_of().tensor_cores else []
    known = [*UNBROADCAST, *ROTARY, *FAST, *ATTENTION, *_GATHERED]
    for rules in (known, PRODUCT, gates, ROUNDED):
        graph = rewrite(graph, rules)
    made = padded(side_by_side(graph), caches)
    nodes = made.graph.nodes()
    padding = next((n for n in nodes if n.op == "Input" and ".left_padding" in n.arg[0]), None)
    if padding is None and any(kind in BATCHES for kind, *_ in caches.keys):
        raise Unsupported("paddings of a batch are not known")
    places = {
        node: node.like("AttentionFrom", *node.src, padding, arg=(_scale(node), node.arg[1]))
        for node in nodes
        if node.op == "Attention"
    }
    return made._replace(graph=made.graph.replaced(places))
