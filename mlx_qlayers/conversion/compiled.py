"""Operations of several launches that a GPU runs as one compiled graph.

They are not dispatched themselves, only what they are made of: the key of a call would hold the
shapes of twenty parameters, which their static arguments tell.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from ..runtime.backend import Mode, current, epoch, mode
from ..runtime.cuda_ahead import together
from ..runtime.threads import here

# Of one graph: MLX looks through them one by one, and prompts have any number of tokens.
MAX_SHAPES = 256
# Backend and mode, thread and stream, and the epoch of measured results.
Context = tuple[Any, ...]

_thread = threading.local()


def context() -> Context | None:
    """What graphs belong to that are made and used now; None where calls run one by one.

    So they do on a CPU, inside another graph, and where a debug mode wants to see each launch.
    """
    device, state = mx.default_device(), current.get()
    if device.type == mx.cpu or epoch.debug or state.mode is not Mode.EAGER:
        return None
    stream = mx.default_stream(device)
    last = getattr(_thread, "stream", None)
    if last is None or last != stream:  # a stream cannot be compared with None
        _thread.stream, _thread.key = stream, (here.number, str(stream))
    return state, _thread.key, epoch.number


def operation(make: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """A function of arrays, of which some may be None, for a context and static arguments.

    A graph is made of it for each context that :func:`context` gives, and for each shape of its
    first two arrays; the static arguments tell the others.
    """

    @lru_cache(maxsize=1024, typed=True)
    @wraps(make)
    def bind(where: Context | None, *static: Any) -> Callable[..., Any]:
        return make(*static) if where is None else Graph(make(*static))

    return bind


class Graph:
    """A function that is compiled before its first use, on arrays that are never evaluated.

    MLX calls it again where a gradient is taken: only then the nodes that carry gradients are
    needed, which cost as much to evaluate as a launch.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.graph = function, mx.compile(self._transformed)
        self.seen: set[Any] = set()

    def _transformed(self, *arrays: Any) -> Any:
        if current.get().mode is Mode.INFERENCE:
            return self.function(*arrays)
        with mode(Mode.TRANSFORMED):
            return self.function(*arrays)

    def ready(self, x: mx.array, *rest: Any) -> Callable[..., Any]:
        """What computes arrays of such shapes."""
        key = x.shape, x.dtype, getattr(rest[0], "shape", None)
        if key not in self.seen:
            if len(self.seen) == MAX_SHAPES:
                return self.function
            with mode(Mode.INFERENCE), together():
                self.graph(
                    *tree_map(lambda a: a if a is None else mx.zeros(a.shape, a.dtype), (x, *rest))
                )
            self.seen.add(key)
        return self.graph

    def __call__(self, *arrays: Any) -> Any:
        return self.ready(*arrays)(*arrays)


def ready(function: Callable[..., Any], *arrays: Any) -> Callable[..., Any]:
    """A bound operation for arrays of such shapes: one call of Python less."""
    return function.ready(*arrays) if isinstance(function, Graph) else function
