"""Side effects of a model's code: a graph of it would have them once, when it is captured.

Modules are twins while a capture runs them (:mod:`.twin`). This file looks at what they share with
the model: their classes, the globals of their files, what functions enclose, and where random
numbers come from.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from operator import attrgetter, setitem
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .snapshot import OTHERS, Snapshot, classes_of
from .twin import assigned

# The name of what random numbers come from, and what reads and writes its state.
_Source = tuple[str, Callable[[], Any], Callable[[Any], Any]]


class Effects:
    """A record of everything that may change while the code of these modules is captured."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        parts = [*parts]
        functions = [*_functions([*classes_of(map(type, parts))])]
        scopes = {id(each.__globals__): each.__globals__ for each in functions}
        cells = {id(c): c for each in functions for c in each.__closure__ or ()}
        self.cells = [(c, c.cell_contents) for c in cells.values() if _is_filled(c)]
        enclosed = {number: value for number, (_, value) in enumerate(self.cells)}
        self.held = Snapshot((), *scopes.values(), enclosed, types=map(type, parts))
        values = [*enclosed.values(), *chain.from_iterable(s.values() for s in scopes.values())]
        attributes = (each.values() for part in parts for each in (part, vars(part)))
        self.sources = [*_sources(chain(values, *attributes))]
        self.states = [get() for _, get, _ in self.sources]

    def undo(self) -> str | None:
        """Put all of it back; what it was that changed, as a sentence, or None."""
        found = None
        for (name, get, put), state in zip(self.sources, self.states, strict=True):
            if not _equal(get(), state):
                found = f"the model draws random numbers of {name} in a call"
                put(state)
        for cell, value in self.cells:
            if not _is_filled(cell) or cell.cell_contents is not value:
                found = found or "the model changes what a function encloses in a call"
                cell.cell_contents = value
        if not self.held.holds():
            names = ", ".join(self.held.difference()[:3])
            found = found or f"the model changes {names} in a call"
            self.held.restore()
        if names := ", ".join(assigned()[:3]):
            found = found or f"the model changes {names} in a call"
        return found


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _functions(classes: list[type]) -> Iterator[FunctionType]:
    """The functions of classes, those that they enclose, and those that their files name."""
    packages = {each.__module__.partition(".")[0] for each in classes}
    todo: list[Any] = [*chain.from_iterable(vars(each).values() for each in classes)]
    seen, files = set[int](), set[int]()
    for each in todo:  # which grows
        each = getattr(each, "__func__", getattr(each, "fget", each))
        if not isinstance(each, FunctionType) or id(each) in seen:
            continue
        seen.add(id(each))
        package = (each.__module__ or "").partition(".")[0]
        if package in OTHERS:
            continue
        yield each
        todo += [c.cell_contents for c in each.__closure__ or () if _is_filled(c)]
        if package in packages and id(each.__globals__) not in files:
            files.add(id(each.__globals__))
            todo += each.__globals__.values()


def _equal(one: Any, other: Any) -> bool:
    """Whether states are the same: of MLX a key, which every number drawn replaces."""
    if isinstance(one, mx.array) or one is other:
        return one is other
    return pickle.dumps(one) == pickle.dumps(other)


def _sources(values: Iterable[Any]) -> Iterator[_Source]:
    """The generators that every process has, and those among some values."""
    ours: Any = mx.random.state  # a key, of this thread
    yield "mlx.random", lambda: ours[0], lambda key: setitem(ours[0], ..., key)
    import numpy as np  # which the import of this package does not wait for

    yield "numpy.random", np.random.get_state, np.random.set_state
    yield "random", random.getstate, random.setstate
    for each in {id(value): value for value in values}.values():
        if isinstance(each, np.random.Generator):
            bits, state = each.bit_generator, attrgetter("state")
            yield "a numpy.random.Generator", partial(state, bits), partial(setattr, bits, "state")
        elif isinstance(each, np.random.RandomState):
            yield "a numpy.random.RandomState", each.get_state, each.set_state
        elif isinstance(each, random.Random):
            yield "a random.Random", each.getstate, each.setstate
