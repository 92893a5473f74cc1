"""Attention of a step's tokens to a cache: what :func:`attention_step` takes.

It reads the cache's buffers and its append buffer, and gives the append buffer with the tokens in
it. So positions are an array, and one graph serves all of them. Rotary embeddings and the RMS norms
of heads become part of it, and its result has heads side by side.

An ``AttentionStep`` node takes queries, keys and values as rows, the buffers, the append buffers,
positions, frequencies, mask, sinks, the weights of both norms, and split-K semaphores. It adds
inputs to those of the model's code: ``append.NUMBER.keys`` and ``append.NUMBER.values`` of a cache,
``at.NUMBER`` of the first cache that counts alike, and ``semaphores.NUMBER`` of each attention in
turn. The new append buffers are outputs by the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ...options import row_words
from ..caches import APPENDED
from ..graph import Graph, Node, Pattern, Rule, Size, Spec, first_rows, rewrite
from .heads import VIEWS, Heads, reshaped, rotated, transposed_heads

ATTENTIONS = "Attention", "AttentionPacked"
BATCHES = frozenset(name for name in APPENDED if name.startswith("Batch"))


class TracedCaches(NamedTuple):
    """The facts that rules know of the caches that a step was captured with."""

    keys: Sequence[tuple[Any, ...]]  # class, case and attributes of each cache, as in `Facts`
    names: Mapping[str, str]  # of counts in the graph, by `NUMBER.ATTRIBUTE`

    def first(self, number: int) -> int:
        """The first of the caches that hold as many tokens and count alike."""
        return next(i for i in range(number + 1) if self._alike(i) == self._alike(number))

    def _alike(self, number: int) -> Any:
        kind, case, *attributes = self.keys[number]
        counts = [self.names.get(f"{number}.{n}") for n in ("_idx", "offset", "_offset", "rows")]
        settings = [dict(attributes).get(n) for n in ("keep", "max_size", "bits", "v_bits")]
        return kind, case, counts, settings

    def counter(self, number: int, attribute: str, more: int = 0) -> Size:
        """A count of a cache as it is in the graph, and so many more."""
        return Size(more, ((self.names[f"{number}.{attribute}"], 1),))


class Written(NamedTuple):
    """Keys or values of a cache that attention takes."""

    number: int  # of the cache
    buffers: tuple[Node, ...]  # what is written into; three of packed ones
    new: Node  # the tokens', (B, Hkv, L, D)
    row: Size  # where the first is written
    size: int  # of a ring that goes round, else 0


def written(nodes: Sequence[Node], name: str, caches: TracedCaches) -> Written | None:
    """The cache that attention takes keys or values of, if tokens were written into it."""
    parts = [part for node in nodes if (part := _part(node, caches)) is not None]
    if len(parts) < len(nodes):
        return None
    first, buffers = parts[0], tuple(part.buffers[0] for part in parts)
    path, settings = f"cache.{first.number}.{name}", dict(caches.keys[first.number][2:])
    packed = "bits" in settings
    paths = [f"{path}.{i}" for i in range(3)] if packed else [path]
    if [buffer.arg[0] for buffer in buffers] != paths:
        return None
    if not packed:
        return first if first.new.dtype == buffers[0].dtype else None
    of = first.new.src[0] if first.new.op == "Item" else None
    bits = settings.get("v_bits" if name == "values" else "bits", settings["bits"])
    if of is None or (of.op, of.arg) != ("Quantize", (settings["group_size"], bits, 0, False)):
        return None
    if any(part.new.src != (of,) or part.new.arg != (i,) for i, part in enumerate(parts)):
        return None
    return first._replace(buffers=buffers, new=of.src[0])


def _part(node: Node, caches: TracedCaches) -> Written | None:
    """The same of one array; of packed ones there are three, and ``new`` is one of theirs."""
    node, counted = first_rows(node)
    while node.op == "Depends":
        node = node.src[0]
    if node.op != "SliceUpdate" or node.src[0].op != "Input":
        return None
    buffer, new = node.src
    where, place, *_ = buffer.arg[0].split(".")
    if where != "cache":
        return None
    number = int(place)
    kind, case, *attributes = caches.keys[number]
    if kind not in APPENDED or case not in ("", "full", "begins"):
        return None
    row, position = (caches.counter(number, each) for each in APPENDED[kind])
    settings, stop = dict(attributes), position._replace(const=new.shape[2])
    if case == "begins":
        row = Size(settings["keep"], ())
    if node.arg[1][2] != (row if row.terms else row.const):
        return None
    if counted != (None if case else stop) or not (case or row == position):
        return None
    return Written(number, (buffer,), new, row, settings["max_size"] if case else 0)


def _is_at(offset: Node | None, number: int, caches: TracedCaches) -> bool:
    """Whether it is the position of a cache's token."""
    if offset is None:
        return False
    if caches.keys[number][0] not in BATCHES:
        return offset.op == "Numbers" and offset.arg == (caches.counter(number, "offset"),)
    name = offset.arg[0] if offset.op == "Input" else ""
    # Caches that count alike have equal offsets: the form that runs the graph checks it.
    of_cache = name.startswith("cache.") and name.endswith(".offset")
    return of_cache and caches.first(int(name.split(".")[1])) == caches.first(number)


def _input(name: str, shape: tuple[Any, ...], dtype: mx.Dtype = mx.int32) -> Node:
    return Node("Input", (), (name,), (Spec(shape, dtype),))


def _step(
    node: Node,
    keys: Written,
    values: Written,
    caches: TracedCaches,
    count: int,
    sizes: dict[int, Any],
) -> Node | None:
    """The node that takes the place of attention; None if nobody knows what its mask shows."""
    (q, *_, mask, sinks), (scale, causal, *_) = node.src, node.arg
    number, settings = keys.number, dict(caches.keys[keys.number][2:])
    tokens, batches = q.shape[2], caches.keys[number][0] in BATCHES
    if mask is not None and mask.op != "Mask":
        return None
    of, shows, padded = mask.arg if mask else (number, 0, False)
    if caches.first(of) != caches.first(number):
        return None
    # Sequences of a batch drop different numbers of tokens, which moves the rows of all buffers.
    causal = causal or mask is not None
    if tokens > 1 and (batches or keys.size or shows or not causal):
        return None
    if {q.dtype, keys.new.dtype, values.new.dtype} != {keys.buffers[-1].dtype}:
        return None
    given = rotated(q, keys.new, lambda offset: _is_at(offset, number, caches))
    (batch, kv_heads, *_), rows = keys.buffers[0].shape, Size(0, (("append", 1),))
    specs = []
    for each in (keys, values):
        width = row_words(each.buffers) if len(each.buffers) > 1 else each.new.shape[3]
        specs.append(Spec((batch, kv_heads, rows, width), each.buffers[0].dtype))
    names = f"append.{number}.keys", f"append.{number}.values"
    appended = [_input(name, *spec) for name, spec in zip(names, specs, strict=True)]
    at, shown, keep = _input(f"at.{caches.first(number)}", (8,)), None, settings.get("keep", 0)
    window = min([each for each in (shows, keys.size) if each], default=0)
    if keep and shows and shows < settings["max_size"]:
        return None
    if window or padded:
        hidden = Spec((batch if padded else 1, 1, 1, rows), mx.bool_)
        settled = window, keep, keys.size, padded
        # Caches that count alike have as many rows, so one mask does for all of them.
        like = sizes.setdefault(caches.first(number), (keys.buffers[0], appended[0]))
        shown = Node("Shown", (at, *like), settled, (hidden,))
    src = (
        *(given.q, given.k, Heads(values.new, tokens).rows()),
        *(*keys.buffers, *values.buffers, *appended, at),
        *(given.freqs, shown, sinks, *given.norms, _input(f"semaphores.{count}", (8,))),
    )
    out = Spec((batch, tokens, q.shape[1] * values.new.shape[3]), q.dtype)
    parts = len(keys.buffers), len(values.buffers)
    arg = scale, given.rotation, given.epsilon, *parts
    return Node("AttentionStep", src, arg, (out, *specs))


def with_append_buffers(graph: Graph, caches: TracedCaches) -> Graph:
    """The graph with attention to append buffers."""
    places, outputs, at = dict[Node, Node](), dict(graph.outputs), dict[str, Any]()
    sizes: dict[int, Any] = {}
    for node in graph.nodes:
        if node.op not in ATTENTIONS:
            continue
        q, *arrays, _, _ = node.src
        half = len(arrays) // 2
        keys, values = (
            written(some, name, caches)
            for name, some in (("keys", arrays[:half]), ("values", arrays[half:]))
        )
        if keys is None or values is None or keys.number != values.number:
            continue
        if (step := _step(node, keys, values, caches, len(places), sizes)) is None:
            continue
        batch, tokens, _ = step.shape
        heads = reshaped(step.item(0), (batch, tokens, q.shape[1], node.shape[-1]))
        places[node] = reshaped(transposed_heads(heads) if tokens > 1 else heads, node.shape)
        for number, (name, each) in enumerate((("keys", keys), ("values", values)), 1):
            # Several attentions to one cache make the same append buffer.
            outputs.setdefault(f"append.{each.number}.{name}", step.item(number))
            for buffer in each.buffers:
                outputs.pop(buffer.arg[0], None)
        place = _input(f"at.{caches.first(keys.number)}", (8,))
        if not keys.size:
            at[keys.row.terms[0][0]] = place, ((0, 1), (1, 1))
        if caches.keys[keys.number][0] not in BATCHES:
            at[caches.names[f"{keys.number}.offset"]] = place, ((2, 1),)
    positions: list[Rule] = [(Pattern(("Numbers", "Arange")), lambda root: _position(root, at))]
    return rewrite(Graph(outputs).replaced(places), [*VIEWS, *positions])


def _position(root: Node, at: Mapping[str, tuple[Node, Any]]) -> Node | None:
    """A position as one of those that attention takes, or as the sum of two."""
    size = root.arg[0]
    if not isinstance(size, Size) or root.shape not in ((), (1,)):
        return None
    ((name, count), *more) = size.terms
    if more or count != 1 or name not in at:
        return None
    place, entries = at[name]
    return Node("At", (place,), ((int(size.const), entries),), root.outputs)
