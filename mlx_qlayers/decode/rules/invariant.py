"""Steps of batch-invariant models: the operations that prompts are computed by, and fused ones
that have their bits.

``Normed`` and ``Gated`` nodes are norms and gates of modules that compute them in prompts by
:mod:`~mlx_qlayers.ops.products_invariant`; products take these in, with the same bits. An
``AttentionFrom`` node takes what an ``Attention`` node does, and the number of rows ahead of each
sequence, or None. ``GatheredProduct`` nodes are MLX's ``GatherQMM``, by this package's operation.
"""

from __future__ import annotations

from collections.abc import Set

import mlx.core as mx

from ...metal.quantized_matmul.gated import RUN
from ...metal.quantized_matmul.normed import MAX_WIDTH
from ...runtime.program import CONSTANT_BELOW
from ..capture import Unsupported
from ..graph import Graph, Node, P, Rule, rewrite
from .activations import ACTIVATIONS
from .attention import ATTENTION
from .attention_step import BATCHES, TracedCaches
from .canonical import FAST, UNBROADCAST
from .padded import PaddedGraph, padded
from .products import gated, products
from .rotary import ROTARY


def _gathered(root: Node) -> Node:
    return root.like("GatheredProduct", *root.src, arg=root.arg)


_ALONE: list[Rule] = [(P("GatherQMM"), _gathered)]


def _scale(attention: Node) -> float:
    """The scale of scores as a model's code has it: what MLX spells out has it in q's dtype."""
    scale, q = attention.arg[0], attention.src[0]
    assert q is not None
    usual: float = q.shape[-1] ** -0.5
    return usual if mx.array(usual, q.dtype).item() == scale else scale


def _is_padding(node: Node) -> bool:
    return node.op == "Input" and str(node.arg[0]).endswith(".left_padding")


def _of_weight(node: Node | None) -> str:
    """The path of the array of the model that a node was multiplied with last; "" for none."""
    while node is not None and node.src and node.op not in ("Input", "Normed"):
        own = [s for s in node.src[1:] if s is not None and s.op == "Input"]
        names = [s.arg[0] for s in own if s.arg[0].startswith("model.")]
        if names:
            return str(names[0])
        node = node.src[0]
    return ""


def _own_rules(parts: Set[str]) -> tuple[list[Rule], list[Rule]]:
    """The rules of norms, and of gates, of modules at such paths."""

    def normed(x: Node, weight: Node, root: Node) -> Node | None:
        width, name = root.shape[-1], weight.arg[0] if weight.op == "Input" else ""
        alike = x.dtype == weight.dtype and CONSTANT_BELOW <= width <= MAX_WIDTH
        if not alike or name.removesuffix(".weight") not in parts:
            return None
        return root.like("Normed", x, weight, arg=root.arg)

    def is_own(gate: Node, up: Node) -> bool:
        modules = _of_weight(gate).split(".")
        is_part = any(".".join(modules[:i]) in parts for i in range(len(modules)))
        return is_part and gate.outputs == up.outputs and gate.shape[-1] % RUN == 0

    def joined(gate: Node, up: Node, act: Node, root: Node) -> Node | None:
        return gated(gate, up, act, root) if is_own(gate, up) else None

    def apart(gate: Node, up: Node, root: Node) -> Node | None:
        return root.like("Gated", gate, up, arg=("silu",)) if is_own(gate, up) else None

    pairs = P("Multiply(act @ Silu(gate @ +Products), up @ +Products)")
    return [(P("RMSNorm(x, weight)"), normed)], [
        (pairs, joined),
        (P("Multiply(Silu(gate), up)"), apart),
    ]


def invariant(graph: Graph, caches: TracedCaches, parts: Set[str] = frozenset()) -> PaddedGraph:
    """A captured step with positions as an array, whose rows have the bits of those of prompts.

    Args:
        graph: as it was captured.
        caches: what rules know of the caches.
        parts: paths of modules whose norms or gates are this package's in prompts.

    Raises:
        Unsupported: something takes positions or paddings in a way that is not known.
    """
    norms, gates = _own_rules(parts)
    known = [*UNBROADCAST, *ROTARY, *FAST, *ACTIVATIONS[:1], *ATTENTION, *_ALONE]
    graph = rewrite(rewrite(graph, known), norms)
    made = padded(products(graph, gates, "Normed"), caches)
    nodes = made.graph.nodes()
    padding = next(filter(_is_padding, nodes), None)
    if padding is None and any(kind in BATCHES for kind, *_ in caches.keys):
        raise Unsupported("paddings of a batch are not known")
    places = {
        node: node.like("AttentionFrom", *node.src, padding, arg=(_scale(node), node.arg[1]))
        for node in nodes
        if node.op == "Attention"
    }
    return made._replace(graph=made.graph.replaced(places))
