"""What is in modules, to see later whether it still is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..layers.sharded import LINEARS


class Snapshot:
    """What is in modules, to see later whether it still is.

    Args:
        parts: the modules.
        others: more dictionaries to look at.
    """

    def __init__(self, parts: list[nn.Module], *others: dict[str, Any]) -> None:
        # The settings of a quantized layer go with its arrays.
        settings = [vars(part) for part in parts if not isinstance(part, LINEARS)]
        self.parts, self.types = parts, [*map(type, parts)]
        self.contents = [*parts, *settings, *others]
        self.before = [dict(each) for each in self.contents]

    def holds(self) -> bool:
        """Whether nothing in them was replaced."""
        try:  # dicts compare what is not identical, and arrays have no truth value
            return [*map(type, self.parts)] == self.types and self.contents == self.before
        except Exception:
            return False

    def difference(self) -> str:
        """What was replaced, as the class of a module and the name of an attribute."""
        return ", ".join({f"{name} of {kind}" for kind, name, *_ in self._replaced()})

    def alike(self) -> bool:
        """Whether nothing was replaced but arrays, by ones of the same shape and dtype."""
        return all(
            isinstance(one, mx.array)
            and isinstance(other, mx.array)
            and (one.shape, one.dtype) == (other.shape, other.dtype)
            for *_, one, other in self._replaced()
        )

    def equal(self) -> bool:
        """Whether nothing was replaced but arrays, by ones of the same numbers."""
        pairs = [(one, other) for *_, one, other in self._replaced()]
        return self.alike() and all(mx.array_equal(*pair).item() for pair in pairs)

    def _replaced(self) -> Iterator[tuple[str, str, Any, Any]]:
        """Class, name, what was there and what is there now."""
        for part, before in zip(self.contents, self.before, strict=True):
            for name in part.keys() | before.keys():
                if part.get(name) is not before.get(name):
                    yield type(part).__name__, name, before.get(name), part.get(name)

    def restore(self) -> None:
        """Put back what was replaced. What was not stays there: other threads may look at it."""
        for part, before in zip(self.contents, self.before, strict=True):
            for name in part.keys() - before.keys():
                dict.__delitem__(part, name)
            dict.update(part, before)
