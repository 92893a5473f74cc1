"""Steps of batch-invariant models: the operations that prompts are computed by, or their bits.

``Products`` round each product before a gate or a residual. ``Swiglu`` nodes are mlx-lm's function,
with tensor cores by this package's operation. An ``AttentionFrom`` node takes what an ``Attention``
node does, and the number of rows ahead of each sequence, or None. ``ExpertsAlone`` nodes are
``Experts`` of one matrix, as a layer computes them.
"""

from __future__ import annotations

from ...runtime.devices import device_of
from ..capture import Unsupported
from ..graph import Graph, Node, P, Pattern, Rule, rewrite
from .attention_step import ATTENTIONS, BATCHES, TracedCaches
from .canonical import UNBROADCAST
from .padded import PaddedGraph, padded
from .products import PRODUCT, ROUNDED, side_by_side


def _experts(root: Node) -> Node:
    return root.like("ExpertsAlone", *root.src, arg=root.arg)


def _swiglu(act: Node, gate: Node, up: Node, root: Node) -> Node | None:
    """The function as a twin has it: with a sigmoid ahead of what it is multiplied by."""
    alike = gate.outputs == up.outputs and act.src[0] is not gate and root.src[0] is act
    return root.like("Swiglu", gate, up) if alike else None


_EXPERTS: list[Rule] = [(P("Experts"), _experts)]
# That of experts is an empty module, which all models share and nobody changes.
_DENSE = Pattern(("Products", "Item"), name="gate")
_SWIGLU: list[Rule] = [
    (P("Multiply(act @ Multiply(gate, Sigmoid(gate)), up)", gate=_DENSE), _swiglu)
]


def invariant(graph: Graph, caches: TracedCaches) -> PaddedGraph:
    """A captured step with positions as an array, whose rows have the bits of those of prompts.

    ``Unsupported`` says that something takes positions or paddings in a way that is not known.
    """
    gates = _SWIGLU if device_of().tensor_cores else []
    for rules in ([*UNBROADCAST, *_EXPERTS], PRODUCT, gates, ROUNDED):
        graph = rewrite(graph, rules)
    made = padded(side_by_side(graph), caches)
    nodes = made.graph.nodes
    padding = next((n for n in nodes if n.op == "Input" and ".left_padding" in n.arg[0]), None)
    if padding is None and any(kind in BATCHES for kind, *_ in caches.keys):
        raise Unsupported("paddings of a batch are not known")
    places = {
        node: node.like("AttentionFrom", *node.src, padding, arg=node.arg)
        for node in nodes
        if node.op in ATTENTIONS
    }
    return made._replace(graph=made.graph.replaced(places))
