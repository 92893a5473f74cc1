"""Functions of arrays that ``mx.compile`` traces once for each shape, where a GPU runs them.

A call of a traced function costs a few microseconds of Python, whatever is worked out inside it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from ..dispatch.entries import on_change
from ..runtime.backend import requested
from ..runtime.health import checking
from ..runtime.legacy import Note, note_again, noting
from ..runtime.tracing import tracing
from .differentiable import without_gradients

# Of one function: MLX looks through them one by one, and prompts have any number of tokens.
MOST_TRACES = 256
# The backend asked for, the thread and the stream.
Place = tuple[str, int, str]

_thread, _numbers = threading.local(), itertools.count(1)


def place() -> Place | None:
    """Where traces are made and used; None where nothing is to be traced.

    The host backend runs at once, and launches are to be seen one by one in the debug modes.
    """
    device = mx.default_device()
    if device.type == mx.cpu or checking() or tracing():
        return None
    stream = mx.default_stream(device)
    known = getattr(_thread, "stream", None)
    if known is None or known != stream:  # a stream cannot be compared with None
        _thread.stream, _thread.name = stream, repr(stream)
        _thread.number = getattr(_thread, "number", None) or next(_numbers)
    return requested(), _thread.number, _thread.name


class Traced:
    """A function that is traced for every shape of its first two arguments, up to a number of them.

    MLX calls it to trace it and, where a gradient is taken, each time. It is traced ahead of its
    first use, on arrays that are never evaluated, and without the nodes that carry gradients.

    Args:
        function: takes trees of arrays, of which some may be None.
        counted: whether :func:`explain` counts what it decides at every call.
    """

    def __init__(self, function: Callable[..., Any], counted: bool = False) -> None:
        self.function, self.counted = function, counted
        self.compiled = mx.compile(self._run)
        self.seen: dict[Any, list[Note]] = {}
        self.ran = False

    def _run(self, *arguments: Any) -> Any:
        self.ran = True
        return self.function(*arguments)

    def __call__(self, x: mx.array, *rest: Any) -> Any:
        alike = x.shape, x.dtype, getattr(rest[0], "shape", None)
        notes = self.seen.get(alike)
        if notes is None:
            if len(self.seen) == MOST_TRACES:
                return self.function(x, *rest)
            with without_gradients(), noting() as notes:
                self.compiled(*tree_map(_empty, (x, *rest)))
            self.seen[alike] = notes
            notes = []
        self.ran = False
        found = self.compiled(x, *rest)
        if self.counted and not self.ran:
            note_again(notes)
        return found


def _empty(array: mx.array | None) -> mx.array | None:
    return None if array is None else mx.zeros(array.shape, array.dtype)


def traced(
    make: Callable[..., Callable[..., Any]], counted: bool = False
) -> Callable[..., Callable[..., Any]]:
    """Keep what ``make`` makes from a key, traced or not; ``__wrapped__`` makes it untraced.

    MLX keeps traces for each thread and stream, so these are parts of the key.
    """

    @lru_cache(maxsize=1024, typed=True)
    def made(at: Place | None, *key: Any) -> Callable[..., Any]:
        return make(*key) if at is None else Traced(make(*key), counted)

    on_change(made.cache_clear)  # what was tuned since is to be used

    @wraps(make)
    def found(at: Place | None, *key: Any) -> Callable[..., Any]:
        return made(at, *key)

    return found
