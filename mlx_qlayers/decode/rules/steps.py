"""Attention of one token a sequence to a cache: what :func:`attention_step` takes.

It reads the cache's buffers and a tail of rows that came since, and gives the tail with the token
in it. So positions are an array, and a graph serves all of them. Rotary embeddings and the RMS
norms of heads go into it, and heads are rows again behind it.

An ``AttentionStep`` node takes queries, keys and values as rows, the buffers, the tails, positions,
frequencies, mask, sinks, the weights of both norms, and tickets. Its inputs beside those of the
model's code are ``tail.NUMBER.keys``, ``tail.NUMBER.values``, ``tickets.NUMBER`` and ``at.NAME``,
where the name is that of the position; its tails are outputs by those names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx

from ...options import Rotation
from ..graph import Graph, Node, Pattern, Rule, Size, Spec, number_of, rewrite, under


def keeps_order(node: Node) -> bool:
    """Whether a node gives the elements of its source in the same order."""
    if node.op in ("Reshape", "Flatten", "Unflatten", "Squeeze", "ExpandDims"):
        return True
    source = node.src[0] if node.src else None
    if node.op != "Transpose" or source is None:
        return False
    kept = [axis for axis in node.arg[0] if source.shape[axis] != 1]
    return kept == sorted(kept)


def views(node: Node) -> Iterator[Node]:
    """A node and those before it that have its elements in its order."""
    yield node
    while keeps_order(node) and node.src[0] is not None:
        node = node.src[0]
        yield node


def _seen_anew(root: Node) -> Node | None:
    """An array that was reshaped and now has the shape again that it had."""
    if not keeps_order(root):
        return None
    before = [*views(root)][1:]
    same = next((each for each in before if each.shape == root.shape), None)
    if same is None and len(before) > 1 and root.op != "Reshape":
        return Node("Reshape", (before[-1],), (root.shape,), root.outputs)
    if same is None and len(before) > 1:
        return Node("Reshape", (before[-1],), root.arg, root.outputs)
    return same


VIEWS: list[Rule] = [
    (Pattern(("Reshape", "Flatten", "Unflatten", "Squeeze", "ExpandDims", "Transpose")), _seen_anew)
]


# Caches whose attention takes a tail, and the count that says where a token is written.
COUNTERS = {"KVCache": "offset", "BatchKVCache": "_idx", "RotatingKVCache": "_idx"}


class Tails(NamedTuple):
    """What rules know of a model's caches.

    Attributes:
        keys: by their numbers what a capture is for: class, case, attributes.
        names: what counts of caches are called in a graph, by the number and the attribute.
    """

    keys: Sequence[tuple[Any, ...]]
    names: Mapping[str, str]


class Written(NamedTuple):
    """Rows of a cache that attention takes.

    Attributes:
        number: of the cache.
        offset: the position of the token.
        buffer: what is written into, and ``new`` the token's row.
        ring: of a rotating cache its size, the rows that it keeps and whether all rows count.
        batch: whether sequences have positions and paddings of their own.
    """

    number: int
    offset: Size
    buffer: Node
    new: Node
    ring: tuple[int, int, bool] | None
    batch: bool


def written(node: Node, name: str, tails: Tails) -> Written | None:
    """What keys or values of attention are, if a token was written into a cache."""
    update = node.src[0] if node.op == "Slice" else node
    if update is None or update.op != "SliceUpdate":
        return None
    buffer, new = update.src
    if buffer is None or new is None or buffer.op != "Input" or new.shape[2] != 1:
        return None
    where, number, *rest = buffer.arg[0].split(".")
    if where != "cache" or rest != [name] or new.dtype != buffer.dtype:
        return None
    kind, case, *others = tails.keys[int(number)]
    counter = COUNTERS.get(kind)
    if counter is None or update.arg[1][2] != _count(tails.names, number, counter):
        return None
    stop = _count(tails.names, number, counter)._replace(const=1)
    counted = node.arg[1][2] if node.op == "Slice" else None
    if counted not in ((None, stop) if case == "fills" else (None,) if case else (stop,)):
        return None
    settings, ring = dict(others), None
    if kind == "RotatingKVCache":
        ring = settings["max_size"], settings["keep"], case == "full"
    batch = kind == "BatchKVCache"
    offset = _count(tails.names, number, "_idx" if batch else "offset")
    return Written(int(number), offset, buffer, new, ring, batch)


def _count(names: Mapping[str, str], number: str, attribute: str) -> Size:
    return Size(0, ((names[f"{number}.{attribute}"], 1),))


class Heads(NamedTuple):
    """Queries or keys, before what attention does with them."""

    rows: Node
    rope: Node | None
    norm: Node | None


def heads(node: Node, cache: Written) -> Heads:
    """What queries or keys (B, H, 1, D) were before a rotary embedding and a norm."""
    rope = norm = None
    own = next((v for v in views(node) if v.op == "RoPE"), None)
    if own is not None and _is_at(own.src[1], cache) and own.src[0] is not None:
        rope, node = own, own.src[0]
    found = next((v for v in views(node) if v.op == "RMSNorm"), None)
    if found is not None and found.src[0] is not None and found.shape[-1] == node.shape[-1]:
        norm, node = found, found.src[0]
    return Heads(node, rope, norm)


def _is_at(offset: Node | None, cache: Written) -> bool:
    if offset is not None and cache.batch and offset.op == "Input":
        name = offset.arg[0]  # those of all caches are the same: whoever runs the graph sees to it
        return bool(name.startswith("cache.") and name.endswith(".offset"))
    return offset is not None and offset.op == "Numbers" and offset.arg == (cache.offset,)


def _rows(node: Node) -> Node:
    """Heads side by side: (B, H, 1, D) as (B, 1, H * D)."""
    batch, *others = node.shape
    shape = batch, 1, prod(others)
    return Node("Reshape", (node,), (shape,), (Spec(shape, node.dtype),))


class _Turned(NamedTuple):
    """Queries and keys as rows, and what is done to both of them before they meet.

    Attributes:
        scale: what the products are multiplied by besides.
        norms: the weights of the RMS norms of heads, or None.
    """

    q: Node
    k: Node
    scale: float
    rotation: Rotation
    freqs: Node | None
    norms: tuple[Node | None, Node | None]
    epsilon: float


def _turned(q: Node, k: Node, cache: Written) -> _Turned:
    """Queries and keys before the rotary embedding and norms that attention does as well."""
    scale = 1.0
    if q.op == "Multiply":  # by a number, which may as well be part of the scale
        number = next((n for s in q.src if s and (n := number_of(under(s))) is not None), None)
        inner = next((s for s in q.src if s and s.shape == q.shape and s.op != "Broadcast"), None)
        if number is not None and inner is not None:
            scale, q = number, inner
    of_q, of_k = heads(q, cache), heads(k, cache)
    rotation, freqs = Rotation(0), None
    if not _alike(of_q.rope, of_k.rope):
        return _Turned(_rows(q), _rows(k), scale, rotation, None, (None, None), 0.0)
    if of_q.rope is not None:
        dims, traditional, base, factor, _ = of_q.rope.arg
        freqs = of_q.rope.src[2] if len(of_q.rope.src) > 2 else None
        rotation = Rotation(dims, traditional, None if freqs else base, factor)
    one, other = of_q.norm, of_k.norm
    if one is None or other is None or one.arg != other.arg or None in (one.src[1], other.src[1]):
        q, k = one or of_q.rows, other or of_k.rows
        return _Turned(_rows(q), _rows(k), scale, rotation, freqs, (None, None), 0.0)
    rows = _rows(of_q.rows), _rows(of_k.rows)
    return _Turned(*rows, scale, rotation, freqs, (one.src[1], other.src[1]), one.arg[0])


def _step(attention: Node, keys: Written, values: Written, tails: Tails) -> Node:
    """The node that takes the place of attention."""
    q, _, _, mask, sinks = attention.src
    assert q is not None
    given = _turned(q, keys.new, keys)
    (batch, kv_heads, *_), tail = keys.buffer.shape, Size(0, (("tail", 1),))
    widths = keys.new.shape[3], values.new.shape[3]
    specs = [Spec((batch, kv_heads, tail, width), attention.dtype) for width in widths]

    def taken(name: str, spec: Spec) -> Node:
        return Node("Input", (), (name,), (spec,))

    eight, number = Spec((8,), mx.int32), keys.number
    names = f"tail.{number}.keys", f"tail.{number}.values"
    of_tail = [taken(*each) for each in zip(names, specs, strict=True)]
    at = taken(f"at.{keys.offset.terms[0][0]}", eight)
    if keys.ring is not None:
        at = taken(f"ring.{_first_alike(keys.number, tails)}", eight)
        if keys.ring[2]:
            hidden = Spec((1, 1, 1, tail), mx.bool_)
            mask = Node("RingMask", (at, keys.buffer, of_tail[0]), keys.ring[:2], (hidden,))
    if keys.batch and mask is not None:
        padding = Node("Input", (), (f"cache.{number}.left_padding",), (Spec((batch,), mx.int32),))
        hidden = Spec((batch, 1, 1, keys.buffer.shape[2]), mx.bool_)
        mask = Node("PaddingMask", (padding, keys.buffer), (), (hidden,))
    src = (
        *(given.q, given.k, _rows(values.new), keys.buffer, values.buffer),
        *(*of_tail, at),
        *(given.freqs, mask, sinks, *given.norms),
        taken(f"tickets.{number}", eight),
    )
    out = Spec((batch, 1, attention.shape[1] * widths[1]), attention.dtype)
    arg = attention.arg[0] * given.scale, given.rotation, given.epsilon, 1, 1
    return Node("AttentionStep", src, arg, (out, *specs))


def _hides_padding(mask: Node) -> bool:
    """Whether a mask is that of a batch whose sequences begin at different rows, and no more."""
    mask = under(mask)
    if mask.op != "LogicalAnd" and (mask.op, mask.arg) != ("BitwiseBinary", (0,)):
        return False
    for one, other in (mask.src, mask.src[::-1]):
        if one is None or other is None or (one.op, other.op) != ("GreaterEqual", "LessEqual"):
            continue
        row, rows = (_range(s) for s in one.src)
        padding, columns = other.src
        while padding is not None and padding.op in ("Broadcast", "ExpandDims"):
            padding = padding.src[0]
        named = padding is not None and padding.op == "Input"
        named = named and padding.arg[0].endswith(".left_padding")  # type: ignore[union-attr]
        last = row is not None and rows is not None and rows[0] == 0 and rows[1] == row[1]
        return bool(named and last and rows == _range(columns))
    return False


def _range(node: Node | None) -> tuple[Any, Any] | None:
    """The numbers of a range that was broadcast."""
    while node is not None and node.op in ("Broadcast", "ExpandDims", "AsType"):
        node = node.src[0]
    if node is None or node.op != "Arange" or node.arg[2] != 1:
        return None
    start, stop, _ = node.arg
    return start, stop


def _first_alike(number: int, tails: Tails) -> int:
    """The first of the caches that hold as many tokens and count alike."""

    def kind(i: int) -> Any:
        counts = (tails.names.get(f"{i}.{name}") for name in ("_idx", "offset", "rows"))
        return tails.keys[i][:2], *counts, dict(tails.keys[i][2:]).get("keep")

    return next(i for i in range(number + 1) if kind(i) == kind(number))


def _alike(one: Node | None, other: Node | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.arg == other.arg and one.src[1:] == other.src[1:]


def by_steps(graph: Graph, tails: Tails) -> Graph:
    """The graph with attention to caches by tails, where a token is all that comes."""
    places: dict[Node, Node] = {}
    outputs = dict(graph.outputs)
    seen = [node for node in graph.nodes() if node.op == "Attention"]
    taken = Counter(node.src[1] for node in seen)
    for node in seen:
        _, k, v, mask, _ = node.src
        if k is None or v is None or taken[k] > 1 or node.shape[2] != 1:
            continue
        keys, values = written(k, "keys", tails), written(v, "values", tails)
        if keys is None or values is None or keys.number != values.number:
            continue
        if mask is not None and not (keys.batch and _hides_padding(mask)):
            continue
        step = _step(node, keys, values, tails)
        out = step.item(0)
        places[node] = Node("Reshape", (out,), (node.shape,), node.outputs)
        for number, (name, each) in enumerate((("keys", keys), ("values", values)), 1):
            outputs.pop(f"cache.{each.number}.{name}", None)
            tail = outputs[f"tail.{each.number}.{name}"] = step.item(number)
            if each.ring is not None:
                src, arg = (each.buffer, tail, step.src[7]), each.ring[:2]
                shown = Node("RingShown", src, arg, each.buffer.outputs)
                outputs[f"cache.{each.number}.{name}"] = shown
    at = {n.arg[0]: n for step in places.values() for n in _inputs(step) if n.arg[0][:3] == "at."}
    if any(key[0] == "BatchKVCache" for key in tails.keys):
        at = {}  # there it is none of one sequence alone
    positions: list[Rule] = [(Pattern(("Numbers",)), lambda root: _position(root, at))]
    return rewrite(Graph(outputs).replaced(places), [*VIEWS, *positions])


def _inputs(view: Node) -> Iterator[Node]:
    """What the step that a view is of takes from outside."""
    (item,) = view.src
    (step,) = item.src if item else (None,)
    return (s for s in (step.src if step else ()) if s is not None and s.op == "Input")


def _position(root: Node, at: dict[str, Node]) -> Node | None:
    """A position as one of those that attention takes."""
    if root.shape or not isinstance(root.arg[0], Size):
        return None
    (size,) = root.arg
    ((name, count), *more) = size.terms
    if more or count != 1 or f"at.{name}" not in at:
        return None
    return Node("Position", (at[f"at.{name}"],), (size.const,), root.outputs)
