"""The contents of modules, to see later whether these changed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..layers.sharded import LINEARS
from ..runtime.in_place import Held

_PACKAGE = __name__.partition(".")[0]
# Packages whose objects and functions are no part of a model.
OTHERS = {"mlx", "numpy", _PACKAGE, *sys.stdlib_module_names} - {"__main__"}


class Snapshot:
    """The contents of modules, to see later whether these changed: by identity, and in place.

    That is to say, in their lists and dictionaries as well, in objects with attributes, and in
    attributes of their classes; and in more dictionaries and classes. ``owners`` are what is in
    dictionaries and lists that hold modules, and ``owned`` what was: modules are not the same if
    their dictionaries are equal.
    """

    def __init__(
        self,
        parts: Iterable[nn.Module],
        *others: dict[Any, Any],
        types: Iterable[type] = (),
    ) -> None:
        self.parts = [*parts]
        self.types = [*map(type, self.parts)]
        # The settings of a quantized layer go with its arrays.
        settings = [(part, vars(part)) for part in self.parts if not isinstance(part, LINEARS)]
        given: list[tuple[Any, dict[Any, Any]]] = [(each, each) for each in (*self.parts, *others)]
        given += settings
        values, seen = chain.from_iterable(each.values() for _, each in given), set[int]()
        inside = [x for value in values for x in _containers(value, seen)]
        owners = (x for x in inside if not isinstance(x, list))
        given += [(x, x if isinstance(x, dict) else vars(x)) for x in owners]
        self.kinds = [type(owner).__name__ for owner, _ in given]
        self.contents = [each for _, each in given]
        self.before = [dict(each) for each in self.contents]
        self.lists = [(each, [*each]) for each in inside if isinstance(each, list)]
        holding = [each for each in self.contents if any(map(_is_owned, each.values()))]
        self.owners = [*(each.values() for each in holding), *(each for each, _ in self.lists)]
        self.owned = [*chain.from_iterable(self.owners)]
        self.classes = [*classes_of([*self.types, *types])]
        self.attributes = [*map(vars, self.classes)]
        self.before_of_classes = [*map(dict, self.attributes)]
        values = chain(self.owned, *(each.values() for each in (*self.before, *self.attributes)))
        self.held = Held(each for each in values if isinstance(each, mx.array))

    def holds(self) -> bool:
        """Whether nothing in them was replaced, or changed in place."""
        now = [*chain.from_iterable(self.owners)]
        try:  # dicts compare what is not identical, and arrays have no truth value
            return (
                len(now) == len(self.owned)
                and all(map(is_, now, self.owned))
                and [*map(type, self.parts)] == self.types
                and self.contents == self.before
                and self.attributes == self.before_of_classes
                and self.held.same()
            )
        except Exception:
            return False

    def difference(self) -> list[str]:
        """The names of replaced attributes with the classes of their modules."""
        names = sorted({f"{name} of {kind}" for kind, name, *_ in self._replaced()})
        return names if self.held.same() else [*names, "an array in place"]

    def equal(self) -> bool:
        """Whether nothing was replaced but arrays, by ones of the same numbers."""
        pairs = [each[2:] for each in self._replaced()]
        return self.held.same() and all(alike(*p) and mx.array_equal(*p).item() for p in pairs)

    def _replaced(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """Class, name, what was there and what is there now."""
        kinds = [*self.kinds, *("list" for _ in self.lists), *(c.__name__ for c in self.classes)]
        now = [*self.contents, *(dict(enumerate(each)) for each, _ in self.lists), *self.attributes]
        before = [*self.before, *(dict(enumerate(each)) for _, each in self.lists)]
        for kind, part, old in zip(kinds, now, before + self.before_of_classes, strict=True):
            for name in part.keys() | old.keys():
                if part.get(name) is not old.get(name):
                    yield kind, name, old.get(name), part.get(name)

    def restore(self) -> None:
        """Put back what was replaced. The rest stays: other threads may look at it."""
        for part, before in zip(self.contents, self.before, strict=True):
            for name in part.keys() - before.keys():
                dict.__delitem__(part, name)
            dict.update(part, before)
        for each, items in self.lists:
            each[:] = items
        pairs = zip(self.attributes, self.before_of_classes, strict=True)
        for cls, (now, before) in zip(self.classes, pairs, strict=True):
            for name in now.keys() - before.keys():
                delattr(cls, name)
            for name, value in before.items():
                if now.get(name) is not value:
                    setattr(cls, name, value)
        self.held.restore()


def alike(one: Any, other: Any) -> bool:
    """Whether two values are arrays of the same shape and dtype."""
    arrays = isinstance(one, mx.array) and isinstance(other, mx.array)
    return arrays and (one.shape, one.dtype) == (other.shape, other.dtype)


def _is_owned(x: object) -> bool:
    """Whether something may equal another one that is not the same."""
    return isinstance(x, nn.Module) or (isinstance(x, mx.array) and x.size == 1)


def _containers(x: Any, seen: set[int]) -> Iterator[Any]:
    """The lists, dictionaries and settings in something, but for modules."""
    known = type(x).__module__.partition(".")[0] in OTHERS
    settings = not known and hasattr(x, "__dict__")
    if isinstance(x, nn.Module) or not (settings or isinstance(x, list | tuple | dict)):
        return
    if id(x) in seen:
        return
    seen.add(id(x))
    if not isinstance(x, tuple):
        yield x
    items = vars(x).values() if settings else x.values() if isinstance(x, dict) else x
    for each in items:
        yield from _containers(each, seen)


def classes_of(types: Iterable[type]) -> Iterator[type]:
    """The classes and their bases whose attributes somebody may change, each once."""
    for cls in dict.fromkeys(chain.from_iterable(each.__mro__ for each in types)):
        package = cls.__module__.partition(".")[0]
        if package not in (_PACKAGE, "builtins") and cls is not nn.Module:
            yield cls
