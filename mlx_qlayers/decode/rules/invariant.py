"""Steps of batch-invariant models: the operations that prompts are computed by, and no others.

A ``Product`` node takes the arrays of ``quantized_matmul`` in turn, an ``AttentionFrom`` node
what an ``Attention`` node does, and the number of rows ahead of each sequence, or None.
``ExpertsAlone`` nodes are ``Experts`` of one matrix, as a layer computes them.
"""

from __future__ import annotations

from ..capture import Unsupported
from ..graph import Graph, Node, P, Rule, rewrite
from .attention_step import ATTENTIONS, BATCHES, TracedCaches
from .canonical import UNBROADCAST
from .padded import PaddedGraph, padded
from .products import PRODUCT


def _alone(root: Node) -> Node:
    """A product as a layer computes it."""
    x, *_, w, scales, biases, bias = root.src
    return root.like("Product", x, w, scales, biases, bias, None, arg=(True, *root.arg[:3]))


def _experts(root: Node) -> Node:
    return root.like("ExpertsAlone", *root.src, arg=root.arg)


_ALONE: list[Rule] = [(P("Products"), _alone), (P("Experts"), _experts)]


def invariant(graph: Graph, caches: TracedCaches) -> PaddedGraph:
    """A captured step with positions as an array, whose rows have the bits of those of prompts.

    Raises:
        Unsupported: something takes positions or paddings in a way that is not known.
    """
    for rules in (UNBROADCAST, PRODUCT, _ALONE):
        graph = rewrite(graph, rules)
    made = padded(graph, caches)
    nodes = made.graph.nodes()
    padding = next((n for n in nodes if n.op == "Input" and ".left_padding" in n.arg[0]), None)
    if padding is None and any(kind in BATCHES for kind, *_ in caches.keys):
        raise Unsupported("paddings of a batch are not known")
    places = {
        node: node.like("AttentionFrom", *node.src, padding, arg=node.arg)
        for node in nodes
        if node.op in ATTENTIONS
    }
    return made._replace(graph=made.graph.replaced(places))
