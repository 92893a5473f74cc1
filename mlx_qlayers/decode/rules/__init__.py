"""What this package fuses: rules in files, applied in this order."""

from __future__ import annotations

from ..graph import Graph, rewrite
from .attention import ATTENTION
from .canonical import FAST, UNBROADCAST
from .products import products
from .rotary import ROTARY
from .steps import by_steps

PASSES = (UNBROADCAST, ROTARY, FAST, ATTENTION)


def fused(graph: Graph, by_tails: bool = False) -> Graph:
    """The graph after all rules.

    Args:
        graph: as it was captured.
        by_tails: whether attention takes the tokens that came since a cache's buffers were written
            as arrays of their own, so that positions are arrays.
    """
    for rules in PASSES:
        graph = rewrite(graph, rules)
    if by_tails:
        graph = by_steps(graph)
    return products(graph)
