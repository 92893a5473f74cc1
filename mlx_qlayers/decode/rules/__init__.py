"""What this package fuses: rules in files, applied in this order."""

from __future__ import annotations

from ..graph import Graph, rewrite
from .activations import ACTIVATIONS
from .attention import ATTENTION
from .canonical import FAST, UNBROADCAST
from .experts import COMBINED, EXPERTS, LIFTED, RESIDUAL
from .latent import LATENT
from .products import products
from .recurrent import RECURRENT, gated_deltas
from .rotary import ROTARY
from .routers import routed
from .steps import Tails, by_steps

PASSES = (
    [*UNBROADCAST, *ROTARY, *FAST, *ACTIVATIONS, *ATTENTION, *RECURRENT, *EXPERTS],
    LIFTED,
    [*COMBINED, *LATENT],
)


def fused(graph: Graph, by_tails: Tails | None = None) -> Graph:
    """The graph after all rules.

    Args:
        graph: as it was captured.
        by_tails: the model's caches, if attention takes the tokens that came since their buffers
            were written as arrays of their own, so that positions are arrays.
    """
    for rules in PASSES:
        graph = rewrite(graph, rules)
    graph = gated_deltas(routed(graph))
    if by_tails is not None:
        graph = by_steps(graph, by_tails)
    return rewrite(products(graph), RESIDUAL)
