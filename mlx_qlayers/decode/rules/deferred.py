"""Norms between products that take no launch: the product ahead gives what those behind need.

A product with a residual, whose result goes through an RMS norm, gives that times the weight too,
and its tile squares; products and experts behind the norm take these. Whether that is faster
depends on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import mlx.core as mx

from ...ops.fused_products import defers_norm
from ...runtime.spec import Spec as ArraySpec
from ..graph import Graph, Node, Spec, product, resolved


def deferred(graph: Graph, values: Mapping[str, int]) -> Graph:
    """The graph for a batch size with norms deferred, where that is faster.

    Batch sizes for which it is faster in the same places have one graph.
    """
    sums = {found[0].outputs[0] for node in graph.nodes if (found := _norm_of(node))}
    specs = {spec: ArraySpec(resolved(spec.shape, values), spec.dtype) for spec in sums}
    faster = frozenset(spec for spec, array in specs.items() if defers_norm(array))
    if faster not in graph.variants:
        graph.variants[faster] = _deferred(graph, faster)
    return graph.variants[faster]


def _deferred(graph: Graph, faster: Set[Spec]) -> Graph:
    sums: dict[Node, Node] = {}
    places: dict[Node, Node] = {}
    for node in graph.nodes:
        found = _norm_of(node)
        if found is None:
            continue
        total, weight, eps = found
        whole = sums.get(total) or _giving(total, weight, faster)
        if whole is None or whole.src[4] is not weight:
            continue
        sums[total], places[total] = whole, whole.item(0)
        rows, squares = whole.item(1), whole.item(2)
        if node.op == "Products":
            src = rows, None, squares, *node.src[3:]
            places[node] = Node(node.op, src, node.arg, node.outputs)
        else:
            src = rows, node.src[1], squares, *node.src[3:]
            places[node] = Node(node.op, src, (*node.arg[:4], eps), node.outputs)
    return _once(graph.replaced(places) if places else graph)


def _once(graph: Graph) -> Graph:
    """Products take a norm that is computed for something else as well."""
    nodes = graph.nodes
    norms = {(n.src, n.arg[0]): n for n in nodes if n.op == "RMSNorm"}
    places: dict[Node, Node] = {}
    for node in nodes:
        same = norms.get((node.src[:2], node.arg[3])) if node.op == "Products" else None
        if same is not None and node.src[2] is None:
            arg = (*node.arg[:3], None, *node.arg[4:])
            places[node] = Node(node.op, (same, None, *node.src[2:]), arg, node.outputs)
    return graph.replaced(places) if places else graph


def _norm_of(node: Node) -> tuple[Node, Node, float] | None:
    """The array that goes through a norm into products, and the norm's weight and epsilon."""
    if node.op not in ("Products", "Experts") or node.src[2] is not None:
        return None
    norm = node if node.op == "Products" else node.src[0]
    if norm.op not in ("Products", "RMSNorm"):
        return None
    (x, weight, *_), eps = norm.src, norm.arg[3 if norm is node else 0]
    return (x, weight, eps) if x and weight and eps is not None else None


def _giving(total: Node, weight: Node, faster: Set[Spec]) -> Node | None:
    """A product with a residual that gives what the norm behind it needs."""
    if total.op != "Products" or len(total.outputs) > 1 or len(total.src) != 9:
        return None
    *ahead, following = total.src[:5]
    if ahead[3] is None or following is not None or total.arg[4] is not None:
        return None
    if weight.dtype != total.dtype or total.outputs[0] not in faster:
        return None
    *rows, width = total.shape
    tiles = Spec((product(rows), -(-width // 16)), mx.float32)
    outputs = (*total.outputs * 2, tiles)
    return Node("Products", (*ahead, weight, *total.src[5:]), total.arg, outputs)
