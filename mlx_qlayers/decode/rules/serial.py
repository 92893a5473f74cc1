"""Rules for the host backend, on which threads run one by one and Python makes each launch.

A norm is a launch of its own there. Queries and keys are turned in one launch, and attention takes
the whole buffers of a cache and how many rows count: its plan is one for all positions.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...metal.attention.decode import MAX_QUERIES
from ...options import Rotation
from ..graph import Graph, Node, Pattern, Rule, Size, Spec, first_rows, rewrite
from .attention_step import of_packed
from .heads import VIEWS, finite, turned_heads
from .masks import Shown, shown


def serial(graph: Graph) -> Graph:
    """The graph of a step as the host backend runs it."""
    places: dict[Node, Node] = {}
    for node in graph.nodes():
        if node.op == "Attention":
            q, k, *_ = node.src
            new = _update(k)[1]
            # Keys that several layers share were turned with the queries of the first.
            places |= {} if new in places else _turned(q, new)
        if node.op == "QuantizedMatmul" and (packed := _packed(node)) is not None:
            places[node] = packed
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
    (of_k, _), (of_v, _) = _update(k), _update(v)
    length = root.shape[2]
    if of_k is None or of_v is None or length > MAX_QUERIES:
        return None
    (*_, count, _) = k.arg[1]
    if mask is not None and not _is_causal(mask, length, count):
        return None
    held = counts.setdefault(count, Node("Numbers", (), ((count,),), (Spec((1,), mx.int32),)))
    arg = root.arg[0], root.arg[1] or mask is not None
    return root.like("AttentionRows", q, of_k, of_v, None, sinks, held, arg=arg)


def _packed(root: Node) -> Node | None:
    """Attention to the rows of a quantized cache, which are read packed."""
    found, (size, _, mode, _) = of_packed(root), root.arg
    if found is None or mode != 0:
        return None
    (batch, heads, length, width), mask, k = found.q.shape, found.mask, found.keys
    # Keys have groups of the same size.
    if size * k[1].shape[3] != width or length > MAX_QUERIES:
        return None
    whole = None if mask is None else _of_heads(mask)
    while mask is not None and mask.op in ("Broadcast", "ExpandDims", "Unflatten"):
        mask = mask.src[0]
    causal = mask is not None and _is_causal(mask, length, k[0].shape[2])
    if mask is not None and not causal and (whole is None or whole.dtype != mx.bool_):
        return None
    out = Spec((batch, heads, length, root.shape[-1]), root.dtype)
    arg, seen = (found.scale, causal, len(k), len(found.values)), None if causal else whole
    node = Node("AttentionPacked", (found.q, *k, *found.values, seen, None), arg, (out,))
    return Node("Reshape", (node,), (root.shape,), root.outputs)


def _of_heads(mask: Node) -> Node | None:
    """A mask as it was before its heads were split into those of keys and their shares."""
    while mask.op in ("Broadcast", "ExpandDims", "Unflatten") and len(mask.shape) != 4:
        mask = mask.src[0]
    if mask.op == "ExpandDims" and len(mask.src[0].shape) == 4:
        mask = mask.src[0]
    return mask if len(mask.shape) <= 4 else None


def _is_causal(mask: Node, length: int, count: Size) -> bool:
    """Whether each of the last tokens of a cache sees those up to itself."""
    first = count._replace(const=count.const - length)
    seen = shown(mask, first, 0, length, lambda name: False)
    return mask.shape[-2:] == (length, count) and seen == Shown(causal=length > 1)


def _update(rows: Node) -> tuple[Node | None, Node | None]:
    """The whole array whose first rows are given, and the rows written into it; or None, None."""
    update, count = first_rows(rows)
    if update.op != "SliceUpdate" or not isinstance(count, Size):
        return None, None
    return update, update.src[1]


def _turned(q: Node, k: Node | None) -> dict[Node, Node]:
    """One node for the rotary embeddings of queries and keys, where these are the same."""
    if k is None or (q.op, q.arg, q.src[1:]) != (k.op, k.arg, k.src[1:]) or k.op != "RoPE":
        return {}
    _, offset, freqs = q.src
    if len(q.shape) != 4 or not mx.issubdtype(offset.dtype, mx.integer):
        return {}
    rows = turned_heads(q.src[0]), turned_heads(k.src[0])
    src = *rows, offset, finite(freqs)
    both = Node("Rotary", src, tuple(Rotation(*q.arg)), (*q.outputs, *k.outputs))
    return {q: both.item(0), k: both.item(1)}
