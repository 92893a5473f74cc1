"""Rules for the host backend, on which threads run one by one and Python makes each launch.

A norm is a launch of its own there. Queries and keys are rotated in one launch, and attention takes
the whole buffers of a cache and how many rows count: its plan is one for all positions.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...metal.attention.decode import MAX_QUERIES
from ...options import Rotation
from ..graph import Graph, Node, Pattern, Rule, Size, Spec, first_rows, rewrite
from .heads import VIEWS, finite, transposed_heads


def serial(graph: Graph) -> Graph:
    """The graph of a step as the host backend runs it."""
    places: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == "Attention":
            q, k, *_ = node.src
            new = update.src[1] if (update := _update(k)) else None
            # Keys that several layers share were rotated with the queries of the first.
            places |= {} if new in places else _rotated(q, new)
    counts: dict[Any, Node] = {}
    by_rows: Rule = Pattern(("Attention",)), lambda root: _by_rows(root, counts)
    normed: Rule = Pattern(("Products",)), _normed_first
    return rewrite(graph.replaced(places), [*VIEWS, by_rows, normed])


def _normed_first(root: Node) -> Node | None:
    x, weight, squares, *others = root.src
    size, bits, mode, epsilon, gate = root.arg
    if epsilon is None or squares is not None:
        return None
    norm = Node("RMSNorm", (x, weight), (epsilon,), x.outputs[:1])
    src = norm, None, None, *others
    return Node(root.op, src, (size, bits, mode, None, gate), root.outputs)


def _by_rows(root: Node, counts: dict[Any, Node]) -> Node | None:
    q, k, v, mask, sinks = root.src
    of_k, of_v, length = _update(k), _update(v), root.shape[2]
    if of_k is None or of_v is None or length > MAX_QUERIES:
        return None
    (*_, count, _) = k.arg[1]
    if mask is not None and not _is_causal(mask, length, count):
        return None
    held = counts.setdefault(count, Node("Numbers", (), ((count,),), (Spec((1,), mx.int32),)))
    arg = root.arg[0], root.arg[1] or mask is not None
    return root.like("AttentionRows", q, of_k, of_v, None, sinks, held, arg=arg)


def _is_causal(mask: Node, length: int, count: Size) -> bool:
    """Whether each of the last tokens of a cache sees those up to itself."""
    causal = mask.op == "Mask" and not any(mask.arg[1:])
    return causal and mask.shape[-2:] == (length, count)


def _update(rows: Node) -> Node | None:
    """The update of an array whose first rows are given, if others were written into it."""
    update, count = first_rows(rows)
    return update if update.op == "SliceUpdate" and isinstance(count, Size) else None


def _rotated(q: Node, k: Node | None) -> dict[Node, Node]:
    """One node for the rotary embeddings of queries and keys, where these are the same."""
    if k is None or (q.op, q.arg, q.src[1:]) != (k.op, k.arg, k.src[1:]) or k.op != "RoPE":
        return {}
    _, offset, freqs = q.src
    if len(q.shape) != 4 or not mx.issubdtype(offset.dtype, mx.integer):
        return {}
    rows = transposed_heads(q.src[0]), transposed_heads(k.src[0])
    src = *rows, offset, finite(freqs)
    both = Node("Rotary", src, tuple(Rotation(*q.arg)), (*q.outputs, *k.outputs))
    return {q: both.item(0), k: both.item(1)}
