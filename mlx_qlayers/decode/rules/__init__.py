"""The rules by which this package fuses nodes, in the order in which they are applied."""

from __future__ import annotations

from ..graph import Graph, rewrite
from .attention_step import TracedCaches, with_append_buffers
from .canonical import ACTIVATIONS, UNBROADCAST
from .experts import COMBINED, EXPERTS, RESIDUAL
from .latent import LATENT
from .products import products
from .recurrent import RECURRENT
from .routers import routed

PASSES = (
    [*UNBROADCAST, *ACTIVATIONS, *RECURRENT, *EXPERTS],
    [*COMBINED, *LATENT],
)


def fused(graph: Graph, caches: TracedCaches | None = None) -> Graph:
    """The graph after all rules; with caches attention takes append buffers."""
    for rules in PASSES:
        graph = rewrite(graph, rules)
    graph = routed(graph)
    if caches is not None:
        graph = with_append_buffers(graph, caches)
    return rewrite(products(graph), RESIDUAL)
