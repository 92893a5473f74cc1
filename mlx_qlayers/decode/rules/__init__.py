"""What this package fuses: rules in files, applied in this order."""

from __future__ import annotations

from ..graph import Graph, rewrite
from .attention import ATTENTION
from .canonical import FAST, UNBROADCAST
from .products import products
from .rotary import ROTARY

PASSES = (UNBROADCAST, ROTARY, FAST, ATTENTION)


def fused(graph: Graph) -> Graph:
    """The graph after all rules."""
    for rules in PASSES:
        graph = rewrite(graph, rules)
    return products(graph)
