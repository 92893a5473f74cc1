"""The arrays of linear layers in one buffer. For NVIDIA GPUs alone, frozen.

So a launch takes one array instead of 3 to 12, of which each costs the host as much as an output,
see :mod:`~..runtime.arena`. The arrays of all linear layers of a module become views of one buffer.
They stay the same objects with the same numbers; only their memory changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

from ..layers.qlinear import Counterpart, QEmbedding
from ..runtime.arena import View, arena, side_by_side, still_there
from ..runtime.backend import Mode, mode
from ..runtime.cuda_ahead import compiled_in_parallel
from ..runtime.devices import device_of


def arrange(model: nn.Module) -> None:
    """Put the arrays of a model's linear layers side by side, where launches can take them so.

    Graphs that are evaluated later still hold the arrays as they were, and their memory.
    """
    if not device_of().launches_views:
        return
    there = {id(each.y): each for each in views_of(model)}
    for part in model.modules():  # which has some twice if they are shared
        arrays = _arrays(part)
        if any(id(a) not in there for a in arrays):
            there |= {id(each.y): each for each in side_by_side(arrays)}
            # Their old buffers have sizes that nobody asks for again.
            mx.clear_cache()
    if id(model) not in _views:
        weakref.finalize(model, _views.pop, id(model), None).atexit = False
    _views[id(model)] = [*there.values()]


@contextmanager
def traced(given: Sequence[mx.array], weights: Sequence[View]) -> Iterator[None]:
    """The context of a trace: launches share arrays, and CUDA's kernels are compiled together.

    Arrays that the graph takes leave it as they are. ``weights`` are where arrays of the model lie.
    """
    with mode(Mode.INFERENCE), compiled_in_parallel(), arena(given, weights):
        yield


def views_of(model: nn.Module) -> list[View]:
    """The buffer views of the arrays that a model still has."""
    there = {id(a) for part in model.modules() for a in part.values()}
    views = [each for each in _views.get(id(model), ()) if id(each.y) in there]
    views = still_there(views)
    if id(model) in _views:
        _views[id(model)] = views
    return views


def _arrays(part: nn.Module) -> list[mx.array]:
    layers = [each for each in part.values() if isinstance(each, Counterpart)]
    linears = [each for each in layers if not isinstance(each, QEmbedding)]
    arrays = [a for each in linears for a in each.values() if isinstance(a, mx.array)]
    return [*{id(a): a for a in arrays if a.ndim and a.size}.values()]


# The keys are identities, because models are dicts, which have no hash.
_views: dict[int, list[View]] = {}
