"""Steps of other batch sizes, made ready in a thread while a server answers its first requests.

Products of few rows are compiled for 2, 4 and whole eights of them, so that a batch which grows
comes to kernels that nobody has launched. Here the steps of all sizes are made, with the plans of
their calls, and those whose kernels are new run once, on zeros: that writes, proves, compiles and
loads them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import mlx.core as mx

from ..runtime.cuda_ahead import compiled_in_parallel, finish
from ..runtime.explain import note, recording
from ..runtime.threads import short_turns
from .graph import Graph, resolved

# The batch sizes at which kernels change, and with those between them all of mlx-lm's server.
_CHANGES = 1, 2, 3, 4, 5, 8, 9, 16, 17, 25
SIZES = *_CHANGES, *(size for size in range(1, 33) if size not in _CHANGES)
# Cleared while a request's own step or prompt is made: the thread leaves Python's lock to it.
_free = threading.Event()
_free.set()
_LONGEST = 0.05  # seconds; a step that takes longer waits for compilers
# Of a cache that an input of a step is, as many as mlx-lm's caches grow by.
_ROWS = 256
THREAD = "steps ahead"


@contextmanager
def first() -> Iterator[None]:
    """Let the thread wait while a request's own step or prompt is made in a ``with`` block."""
    _free.clear()
    try:
        yield
    finally:
        _free.set()


def give_way() -> None:
    """Wait, in the thread, for a request whose step or prompt is being made."""
    if not _free.wait(_LONGEST):
        _free.set()


def begin(sizes: Iterable[int], logits: Callable[[int], mx.array | None]) -> None:
    """Compute a step's logits for some batch sizes in another thread, in this one's context."""
    given = _made_ready, sizes, logits
    try:
        threading.Thread(target=copy_context().run, args=given, name=THREAD).start()
    except RuntimeError as error:  # there are too many, or the process ends
        note("step", "not ahead", str(error))


def _made_ready(sizes: Iterable[int], logits: Callable[[int], mx.array | None]) -> None:
    goes_on = threading.main_thread().is_alive  # else the process ends, and waits for this thread

    def tried(run: Callable[..., Any], given: Any) -> Any:
        try:
            return run(given) if goes_on() else None
        except Exception as error:  # a request that needs such a kernel meets it again
            note("step", "not ahead", f"{type(error).__name__}: {error}")

    with recording(notes=False):  # nobody called these
        with short_turns(), compiled_in_parallel(waits=False):
            made = {size: tried(logits, size) for size in sizes}
        finish()
        for size in _CHANGES:
            tried(mx.eval, made.pop(size, None))


def zeros(graph: Graph, batch: int, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The inputs of a step besides its weights, of caches that hold zeros."""
    sizes = defaultdict(lambda: _ROWS, batch=batch)
    inputs = {node.arg[0]: node for node in graph.nodes if node.op == "Input"}
    return {
        name: mx.zeros(resolved(node.shape, sizes), node.dtype)
        for name, node in inputs.items()
        if name not in weights
    }
