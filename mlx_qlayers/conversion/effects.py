"""What a call of a model's code does besides computing: a graph of it would do that once."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from operator import attrgetter, setitem
from types import FunctionType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..decode.snapshot import Snapshot
from .matcher import names_used
from .recorder import is_of_a_model
from .step_kinds import Changes, Unsupported


class NotTheSame(Unsupported):
    """The code draws random numbers; or another thread did meanwhile."""


class _Source(NamedTuple):
    """Where random numbers come from, and how its state is read and written."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]


class Effects:
    """What calls of a model's code change: modules, their classes, globals, random numbers.

    Args:
        parts: the model and the modules in it.

    Attributes:
        modules: what is in these.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.modules = Snapshot(parts)
        classes = self.modules.before_of_classes
        scopes: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        for function in _functions(chain.from_iterable(each.values() for each in classes)):
            scope = function.__globals__
            _, used = scopes.setdefault(id(scope), (scope, {}))
            used.update((n, scope[n]) for n in names_used(function) if n in scope)
        self.globals = [*scopes.values()]
        held = (*self.modules.before, *classes, *(each for _, each in self.globals))
        self.sources = [*_sources(chain.from_iterable(each.values() for each in held))]
        self.states = [each.get() for each in self.sources]

    def check(self) -> None:
        """Look at all but the modules.

        Raises:
            NotTheSame: random numbers were drawn.
            Changes: a global was changed.
        """
        for source, state in zip(self.sources, self.states, strict=True):
            if not _equal(source.get(), state):
                raise NotTheSame(f"the model draws random numbers of {source.name} in a call")
        changed = {n for now, old in self.globals for n in old if now.get(n) is not old[n]}
        if changed:
            raise Changes(changed)

    def undo(self) -> None:
        """Put all of it back."""
        if not self.modules.holds():
            self.modules.restore()
        for source, state in zip(self.sources, self.states, strict=True):
            if not _equal(source.get(), state):
                source.put(state)
        for now, old in self.globals:
            now.update({n: value for n, value in old.items() if now.get(n) is not value})


def _functions(values: Iterable[Any]) -> list[FunctionType]:
    """Those among the attributes of classes, and those of models' files that they call by name."""
    todo = [getattr(each, "__func__", each) for each in values]
    todo = [each for each in todo if isinstance(each, FunctionType)]
    seen = {*todo}
    for each in todo:  # which grows
        named = (each.__globals__.get(name) for name in names_used(each))
        more = {f for f in named if isinstance(f, FunctionType) and is_of_a_model(f)} - seen
        todo += more
        seen |= more
    return [each for each in todo if is_of_a_model(each)]


def _equal(one: Any, other: Any) -> bool:
    """Whether states are the same: of MLX a key, which every number drawn replaces."""
    if isinstance(one, mx.array) or one is other:
        return one is other
    return pickle.dumps(one) == pickle.dumps(other)


def _sources(values: Iterable[Any]) -> Iterator[_Source]:
    """Those that a process has anyway, and those among some values."""

    ours: Any = mx.random.state  # a key, of this thread
    yield _Source("mlx.random", lambda: ours[0], lambda key: setitem(ours[0], ..., key))
    import numpy as np  # which the import of this package does not wait for

    yield _Source("numpy.random", np.random.get_state, np.random.set_state)
    yield _Source("random", random.getstate, random.setstate)
    for each in {id(value): value for value in values}.values():
        if isinstance(each, np.random.Generator):
            bits, state = each.bit_generator, attrgetter("state")
            put = partial(setattr, bits, "state")
            yield _Source("a numpy.random.Generator", partial(state, bits), put)
        elif isinstance(each, np.random.RandomState):
            yield _Source("a numpy.random.RandomState", each.get_state, each.set_state)
        elif isinstance(each, random.Random):
            yield _Source("a random.Random", each.getstate, each.setstate)
