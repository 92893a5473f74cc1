"""A graph whose positions become an array: what takes the place of its nodes so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from ..capture import Unsupported
from ..graph import Node, Size, Spec, Value, names_in
from .attention_step import TracedCaches

# The input that has all positions, in the order of their names in a graph.
POSITIONS = "positions"
# The prefix of the name of the rows of the largest buffer with a position.
WIDEST = "widest."


def is_position(value: Any) -> bool:
    """Whether numbers depend on more than the batch size and the rows of buffers."""
    return any(n != "batch" and not n.endswith(".rows") for n in names_in(value))


def rows_of(name: str) -> str:
    """The name of the rows of buffers, from their name in a graph or that of a position."""
    return name if name.endswith(".rows") else f"{name}.rows"


class Padding:
    """One pass over a graph."""

    def __init__(self, caches: TracedCaches) -> None:
        self.new: dict[Node, Node] = {}  # what takes the place of a node
        self.made: dict[Any, Node] = {}
        self.names: list[str] = []  # of positions, in the order in which the array has them
        self.caches = caches
        self.rows: dict[str, Any] = {}  # of caches by their numbers
        for name, other in caches.names.items():
            number, _, kind = name.partition(".")
            if kind == "rows":
                self.rows[number] = Size(0, ((rows_of(other), 1),))

    def make(self, op: str, src: Sequence[Node | None], arg: Any, *outputs: Spec) -> Node:
        """A node; the same as before for the same."""
        node = Node(op, tuple(src), arg, outputs)
        return self.made.setdefault(node.key(), node)

    def at(self, numbers: Sequence[Any], spec: Spec) -> Node:
        """Numbers, of which some depend on positions, as an array."""
        entries = []
        for number in numbers:
            size = number if isinstance(number, Size) else Size(number, ())
            moving = [term for term in size.terms if is_position(Size(0, (term,)))]
            known = tuple(term for term in size.terms if term not in moving)
            self.names += [name for name, _ in moving if name not in self.names]
            places = tuple((self.names.index(name), count) for name, count in moving)
            entries.append((Size(size.const, known) if known else size.const, places))
        source = self.make("Input", (), (POSITIONS,), Spec((1,), mx.int32))
        return self.make("At", (source,), tuple(entries), spec)

    def width(self, size: Size) -> Any:
        """How many rows to make where so many count."""
        (name,) = (n for n, _ in size.terms if is_position(Size(0, ((n, 1),))))
        numbers = [n.partition(".")[0] for n, other in self.caches.names.items() if other == name]
        found = {self.rows[n] for n in numbers if n in self.rows}
        return found.pop() if len(found) == 1 else Size(0, ((rows_of(WIDEST + name), 1),))

    def narrowest(self, widths: Iterable[Any]) -> Any:
        """The rows of arrays that meet: what is behind may be cut off."""
        found = {*widths} - {1}
        of_buffers = {w for w in found if not any(n.startswith(WIDEST) for n in names_in(w))}
        if len(of_buffers) > 1 or not found:
            raise Unsupported("buffers of other sizes meet")
        return (of_buffers or found).pop()

    def shape(self, node: Node, old: Sequence[Any]) -> tuple[Any, ...]:
        """A shape with the rows that the sources of a node have now."""
        known: dict[Any, set[Any]] = {}
        for before in filter(None, node.src):
            for n, count in zip(self.new[before].shape, before.shape, strict=True):
                known.setdefault(count, set()).add(n)

        def rows(n: Any) -> Any:
            return self.narrowest(known[n]) if n in known else self.width(n)

        return tuple(rows(n) if is_position(n) else n for n in old)

    def cut(self, node: Node, shape: Sequence[Any]) -> Node:
        """An array without rows that are behind those of a shape."""
        ahead = len(node.shape) - len(shape)
        pairs = zip(node.shape[max(0, ahead) :], shape[max(0, -ahead) :], strict=True)
        cut = [b if any(n.endswith(".rows") for n in names_in(a)) else a for a, b in pairs]
        new = (*node.shape[: max(0, ahead)], *cut)
        if new == node.shape:
            return node
        return self.make("Slice", (node,), from_0(new), Spec(new, node.dtype))

    def resized(self, node: Node, axis: int, rows: Any) -> Node:
        """An array without rows that are behind so many."""
        return self.cut(node, (*node.shape[:axis], rows, *node.shape[axis + 1 :]))

    def number(self, number: Any, dtype: mx.Dtype) -> Node:
        """A constant."""
        if (number, dtype) not in self.made:
            value = Value(mx.array(number, dtype))
            self.made[number, dtype] = Node("Constant", (), (value,), (Spec((), dtype),))
        return self.made[number, dtype]

    def seen(self, count: Size, width: Any, behind: int, length: int = 1) -> Node:
        """Which rows count, of those that are there: ``count`` do for the last token.

        ``behind`` are axes behind; none of several tokens, whose axis is ahead: each sees the rows
        up to its own.
        """
        rows = self.make("Arange", (), (0, width, 1), Spec((width,), mx.int32))
        shape, spec = (width, *(1,) * behind), Spec((), mx.int32)
        if behind:
            rows = self.make("Reshape", (rows,), (shape,), Spec(shape, mx.int32))
        if length > 1:
            shape, spec = (length, width), Spec((length, 1), mx.int32)
        ends = [count._replace(const=count.const - i) for i in range(length)][::-1]
        return self.make("Less", (rows, self.at(ends, spec)), (), Spec(shape, mx.bool_))

    def filled(self, node: Node, old: Node, axis: int, number: Any) -> Node:
        """An array with a number in the rows behind."""
        behind = len(node.shape) - 1 - axis % len(node.shape)
        seen = self.seen(old.shape[axis], node.shape[axis], behind)
        src = seen, node, self.number(number, node.dtype)
        return self.make("Select", src, (), *node.outputs[:1])


def from_0(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    return (0,) * len(shape), shape, (1,) * len(shape)
