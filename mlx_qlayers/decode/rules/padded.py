"""Positions as arrays: the graph of a step that serves all of them, as long as buffers do not grow.

Where a step takes the rows of a cache that count, this takes all that its buffers have. The rows
behind go through everything that keeps rows apart, and are hidden where rows meet: in attention,
softmax and other reductions. Writes into a buffer go where an array says. Buffers hold
finite numbers, so those behind, times zero, are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, prod
from typing import Any, NamedTuple

import mlx.core as mx

from ..capture import Unsupported
from ..graph import Graph, Node, P, Size, Spec, fits, less
from .attention_step import ATTENTIONS, TracedCaches
from .canonical import ELEMENTWISE
from .padding import Padding, from_0, is_position

_RESHAPES = ("ExpandDims", "Flatten", "Reshape", "Squeeze", "Unflatten")
# Operations whose last axis belongs to one row.
_OF_ROWS = ("RMSNorm", "LayerNorm", "RoPE", "Quantize", "Products", "View", "Hadamard")
_KEPT = (
    *(*ELEMENTWISE, *_RESHAPES, *_OF_ROWS, "Transpose", "Abs", "AsType", "Broadcast", "Copy"),
    *("Concatenate", "Cos", "Depends", "Exp", "Floor", "FloorDivide", "Full", "GatherAxis", "Log"),
    *("Log1p", "LogicalNot", "Mask", "Negative", "ScatterAxis", "Sigmoid", "Sin", "Sqrt"),
    *("Square", "Tanh"),
)
_ROLLED = P("Concatenate(Item[1](split @ Split(old)), Item[0](split))")
# The neutral elements of reductions by number: all, any, sum, prod, min, max.
_NOTHING = (True, False, 0, 1, inf, -inf)
Sources = tuple[Any, ...]


def _unknown(now: Padding, node: Node, src: Sources) -> Node:
    raise Unsupported(f"{node.op} of rows that count")


def _input(now: Padding, node: Node, src: Sources) -> Node:
    kind, _, rest = node.arg[0].partition(".")
    number, spec = rest.partition(".")[0], node.outputs[0]
    if kind == "cache" and len(node.shape) == 4 and number in now.rows:
        if isinstance(node.shape[2], Size):
            spec = Spec((*node.shape[:2], now.rows[number], node.shape[3]), node.dtype)
        else:
            now.rows[number] = node.shape[2]
    return now.make(node.op, src, node.arg, spec)


def _numbers(now: Padding, node: Node, src: Sources) -> Node:
    return now.at(node.arg, node.outputs[0])


def _arange(now: Padding, node: Node, src: Sources) -> Node:
    start, _, step = node.arg
    (count,), dtype = node.shape, node.dtype
    if step != 1:
        return _unknown(now, node, src)
    width = now.width(count) if is_position(count) else count
    begin, spec = 0 if is_position(start) else start, Spec((width,), dtype)
    rows = now.make("Arange", (), (begin, less(width, -begin), step), spec)
    if not is_position(start):
        return rows
    return now.make("Add", (rows, now.at((start,), Spec((), dtype))), (), spec)


def _kept(now: Padding, node: Node, src: Sources) -> Node:
    """Operations that keep rows apart."""
    moves = is_position(node.shape[-1:])
    if node.op == "Concatenate":
        if (rolled := _rolled(now, node)) is not None:
            return rolled
        moves = any(s and is_position(s.shape[node.arg[0]]) for s in node.src)
    if node.op in _RESHAPES and _ahead(node) != _ahead(node.src[0]):
        return _unknown(now, node, src)
    if moves and node.op in (*_OF_ROWS, "Concatenate"):
        return _unknown(now, node, src)
    specs = [Spec(now.shape(node, each.shape), each.dtype) for each in node.outputs]
    if node.op in (*ELEMENTWISE, "Concatenate"):
        src = tuple(s and now.cut(s, specs[0].shape) for s in src)
    arg = (specs[0].shape,) if node.op in ("Broadcast", "Reshape") else node.arg
    return now.make(node.op, src, arg, *specs)


def _item(now: Padding, node: Node, src: Sources) -> Node:
    return now.make(node.op, src, node.arg, src[0].outputs[node.arg[0]])


def _ahead(node: Node | None) -> list[tuple[Any, int]]:
    """The axes of rows that count, and how many elements are ahead."""
    shape = node.shape if node else ()
    numbers = [7919 * len(n.terms) + n.const if isinstance(n, Size) else n for n in shape]
    return [(n, prod(numbers[:i])) for i, n in enumerate(shape) if is_position(n)]


def _slice(now: Padding, node: Node, src: Sources) -> Node:
    (source,), old = src, node.src[0]
    is_last = old.op == "ArgPartition" and is_position(old.arg[0])
    begin: dict[int, Any] = {}
    start, stop, step = ([*each] for each in node.arg)
    shape = [*node.shape]
    for axis, (a, b) in enumerate(zip(start, stop, strict=True)):
        rows, size = source.shape[axis], shape[axis]
        if is_position((a, b)) and (step[axis] != 1 or (is_position(a) and is_position(size))):
            return _unknown(now, node, src)
        if is_position(a) and is_last and b == old.shape[axis]:
            start[axis], stop[axis] = less(rows, size), rows
        elif is_position(a):
            begin[axis], start[axis], stop[axis] = a, 0, size
        elif is_position(b) or (a, b) == (0, old.shape[axis]):  # all that are there
            stop[axis], shape[axis] = rows, less(rows, a)
    if begin:
        sizes = tuple(shape[i] if i in begin else n for i, n in enumerate(source.shape))
        where = now.at([*begin.values()], Spec((len(begin),), mx.int32))
        source = now.make("SliceAt", (source, where), ((*begin,), sizes), Spec(sizes, node.dtype))
    arg = tuple(start), tuple(stop), tuple(step)
    if arg != from_0(source.shape):
        source = now.make("Slice", (source,), arg, Spec(tuple(shape), node.dtype))
    return source


def _slice_update(now: Padding, node: Node, src: Sources) -> Node:
    kind, start, stop, step = node.arg
    new = node.src[1]
    if kind != 4 or {*step} != {1} or is_position(new.shape):
        return _unknown(now, node, src)
    if not is_position((start, stop)):
        return now.make(node.op, src, node.arg, src[0].outputs[0])
    axes = tuple(i for i, n in enumerate(start) if n)
    where = now.at([start[i] for i in axes], Spec((len(axes),), mx.int32))
    return now.make("SliceUpdateAt", (*src, where), axes, src[0].outputs[0])


def _same(now: Padding, node: Node, src: Sources) -> Node:
    return now.make(node.op, src, node.arg, *node.outputs)


def _rolled(now: Padding, node: Node) -> Node | None:
    """Two parts of an array in the other order."""
    found = fits(_ROLLED, node)
    if found is None or found["split"].arg[1:] != node.arg:
        return None
    old, ((place,), axis) = found["old"], found["split"].arg
    x = now.new[old]
    if place == old.shape[axis]:
        return x
    if is_position(old.shape):
        return None
    shape = (*x.shape[:axis], 2 * x.shape[axis], *x.shape[axis + 1 :])
    twice = now.make("Concatenate", (x, x), (axis,), Spec(shape, x.dtype))
    where = now.at([place], Spec((1,), mx.int32))
    return now.make("SliceAt", (twice, where), ((axis,), x.shape), *x.outputs)


def _product(now: Padding, node: Node, src: Sources) -> Node:
    """A product with keys, or with values by shares that are zero behind the rows that count."""
    (x, *others), old = src, node.src[1]
    axis = len(old.shape) - 2
    if is_position(old.shape[axis]):
        if node.src[0].op != "Softmax":
            return _unknown(now, node, src)
        rows = now.narrowest((x.shape[-1], others[0].shape[axis]))
        x = now.resized(x, len(x.shape) - 1, rows)
        others = [now.resized(each, axis, rows) for each in others]
    spec = Spec(now.shape(node, node.shape), node.dtype)
    return now.make(node.op, (x, *others), node.arg, spec)


def _reduce(now: Padding, node: Node, src: Sources) -> Node:
    """A reduction, or a softmax along the last axis: rows behind are neutral."""
    (x,), old, is_softmax = src, node.src[0], node.op == "Softmax"
    axes, number = ((-1,), -inf) if is_softmax else (node.arg[1], _NOTHING[node.arg[0]])
    for axis in axes:
        if is_position(old.shape[axis]):
            x = now.filled(x, old, axis, number)
    shape = x.shape if is_softmax else now.shape(node, node.shape)
    return now.make(node.op, (x,), node.arg, Spec(shape, node.dtype))


def _partition(now: Padding, node: Node, src: Sources) -> Node:
    """The last in order, if what comes ahead of them is a position; else the first."""
    (x,), (place, axis) = src, node.arg
    count, width, last = node.shape[axis], x.shape[axis], is_position(place)
    if last and place.terms != count.terms:
        return _unknown(now, node, src)
    if is_position(count):
        x = now.filled(x, node, axis, -inf if last else inf)
    place = less(width, count.const - place.const) if last else place
    return now.make(node.op, (x,), (place, axis), Spec(x.shape, node.dtype))


def _attention(now: Padding, node: Node, src: Sources) -> Node:
    (q, *arrays, mask, sinks), (scale, causal, *parts), keys = src, node.arg, node.src[1]
    if not is_position(keys.shape[2]):
        return _same(now, node, src)
    width = now.narrowest(each.shape[2] for each in arrays)
    arrays = [now.resized(each, 2, width) for each in arrays]
    seen = now.seen(keys.shape[2], width, 0, q.shape[2] if causal else 1)
    src = q, *arrays, _hidden(now, mask, seen), sinks
    return now.make(node.op, src, (scale, False, *parts), *node.outputs)


def _hidden(now: Padding, mask: Node | None, seen: Node) -> Node:
    """A mask of four axes that hides what is behind as well."""
    if mask is None or len(mask.shape) < 4:
        shape = (1,) * (4 - len(seen.shape)) + seen.shape
        seen = now.make("Reshape", (seen,), (shape,), Spec(shape, seen.dtype))
    if mask is None:
        return seen
    width = seen.shape[-1]
    mask = now.resized(mask, len(mask.shape) - 1, width)
    ahead = (1,) * (4 - len(mask.shape)) + mask.shape[:-1]
    spec = Spec((*ahead, width), mask.dtype)
    if mask.dtype == mx.bool_:
        return now.make("LogicalAnd", (mask, seen), (), spec)
    return now.make("Select", (seen, mask, now.number(-inf, mask.dtype)), (), spec)


def _latent(now: Padding, node: Node, src: Sources) -> Node:
    """It takes all rows, and the last that counts as an array."""
    *arrays, mask = src
    if mask is not None:
        mask = now.resized(mask, len(mask.shape) - 1, arrays[2].shape[2])
    return now.make(node.op, (*arrays, mask), node.arg, *node.outputs)


_RULES: Mapping[str, Callable[[Padding, Node, Sources], Node]] = {
    **dict.fromkeys(_KEPT, _kept),
    "ArgPartition": _partition,
    "Arange": _arange,
    **dict.fromkeys(ATTENTIONS, _attention),
    "Input": _input,
    "Item": _item,
    "Latent": _latent,
    "Matmul": _product,
    "Numbers": _numbers,
    "QuantizedMatmul": _product,
    "Reduce": _reduce,
    "Slice": _slice,
    "SliceUpdate": _slice_update,
    "Softmax": _reduce,
    "Split": _same,  # only what is put together again is known
}


class PaddedGraph(NamedTuple):
    """A graph with positions as an array."""

    graph: Graph
    positions: list[str]  # their names in turn


def padded(graph: Graph, caches: TracedCaches) -> PaddedGraph:
    """The graph with positions as an array.

    ``Unsupported`` says that something takes the rows that count in a way that is not known.
    """
    now = Padding(caches)
    for node in graph.nodes:
        src = tuple(s and now.new[s] for s in node.src)
        shapes = [each.shape for each in (*node.outputs, *node.src) if each]
        moves = node.op == "Input" or is_position((*shapes, node.arg))
        now.new[node] = (_RULES.get(node.op, _unknown) if moves else _same)(now, node, src)
    made = Graph({name: now.new[node] for name, node in graph.outputs.items()})
    inputs = {n.arg: new.shape for n, new in now.new.items() if n.op == "Input"}
    for name, node in graph.outputs.items():
        if is_position(node.shape) and now.new[node].shape != inputs.get((name,)):
            raise Unsupported(f"{name} grows with each token")
    if left := next((node for node in made.nodes if is_position(node.arg)), None):
        _unknown(now, left, ())
    return PaddedGraph(made, now.names)
