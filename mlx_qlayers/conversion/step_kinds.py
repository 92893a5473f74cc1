"""What the graph of a step is made for, of a model's caches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx


class Unsupported(Exception):
    """Why a step is left to the model."""


class OfCaches(Unsupported):
    """Why it is as long as caches hold what they do."""


class Changes(Unsupported):
    """A call of the model changes something that a graph would not.

    Attributes:
        names: what.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        super().__init__(f"the model changes {', '.join(sorted(self.names))} in a call")


class Rows(NamedTuple):
    """What a graph is made for, of a cache of keys and values.

    Attributes:
        kind: its class.
        shapes: of keys and values: (B, Hkv, S, D) and (B, Hkv, S, Dv).
        dtype: of both.
        group: caches of one group are at the same positions.
        full: all rows count.
        rotated: a batch of which each sequence loses a token for a new one.
        settings: attributes that no token changes.
        tail: rows of its tail; 0 where there is none.
        is_ring: with a tail: of a rotating cache.
        joined: with a tail: keys and values are the halves of one array.
    """

    kind: type
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: mx.Dtype
    group: int
    full: bool
    rotated: bool
    settings: tuple[tuple[str, Any], ...]
    tail: int = 0
    is_ring: bool = False
    joined: bool = False


class States(NamedTuple):
    """What a graph is made for, of a cache of arrays: which of them there are, and their shapes."""

    kind: type
    shapes: tuple[Any, ...]


class Nested(NamedTuple):
    """What a graph is made for, of a list of caches."""

    parts: tuple[Any, ...]


Static = Rows | States | Nested | None


def with_rows(static: Static, rows: int) -> Static:
    """What a graph is made for, with buffers of so many rows."""
    if isinstance(static, Rows):
        keys, values = ((b, h, rows, d) for b, h, _, d in static.shapes)
        # A ring of that size, whose window may be smaller.
        changed = {"max_size": rows, "keep": 0}
        settings = tuple((name, changed.get(name, v)) for name, v in static.settings)
        return static._replace(shapes=(keys, values), full=False, rotated=False, settings=settings)
    if isinstance(static, Nested):
        return Nested(tuple(with_rows(part, rows) for part in static.parts))
    return static


def rows_of_all(static: Sequence[Static]) -> Iterator[int]:
    """The rows of all caches of keys and values."""
    for each in static:
        if isinstance(each, Nested):
            yield from rows_of_all(each.parts)
        elif isinstance(each, Rows):
            yield each.shapes[0][2]
