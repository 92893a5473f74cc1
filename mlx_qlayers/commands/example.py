"""The record of an example call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_map

from ..conversion.verify import arrays_in
from ..metal.record import in_float32
from ..reference.rounding import rounding_error
from ..runtime.backend import use_backend
from ..runtime.transformed import uncompiled


class Example(NamedTuple):
    """A call that kernels compute and stock operators as well."""

    name: str  # which of the operation's kernels; for the page, behind the family's
    function: Callable[..., Any]  # the operation
    arguments: dict[str, Any]  # what it takes, by name; arrays may stand in lists and tuples
    gradients: Sequence[str] = ()  # the arguments whose gradients are computed as well
    terms: int = 1  # how many a sum in it has
    steps: int = 2  # how many roundings follow each other

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays among the arguments."""
        return arrays_in(self.arguments)

    def results(self, *arrays: mx.array) -> list[mx.array]:
        """The operation's results for other arrays in the place of the example's."""
        return _results(self.function(**self._given(arrays)))

    def run(self, *arrays: mx.array) -> list[mx.array]:
        """The same, and gradients for a cotangent that every dtype holds exactly.

        It adds up to zero over no group: of a gradient that cancels only its rounding is left.
        """
        given, names = self._given(arrays), self.gradients

        def loss(*values: mx.array) -> mx.array:
            changed = given | dict(zip(names, values, strict=True))
            wide = [y.astype(mx.float32) for y in _results(self.function(**changed))]
            parts = [y * (mx.arange(y.size).reshape(y.shape) % 5 - 1.75) for y in wide]
            return sum((part.sum() for part in parts[1:]), parts[0].sum())

        found = _results(self.function(**given))
        if names:
            argnums = list(range(len(names)))
            found += _results(mx.grad(loss, argnums=argnums)(*(given[name] for name in names)))
        return found

    def error(self, *runs: Sequence[mx.array]) -> tuple[float, float]:
        """How far results are from stock operators on a CPU, and how far roundings may be."""
        # MLX 0.32.4 may crash where two CPU threads are the first to read an array of a GPU.
        read: list[Any] = [memoryview(in_float32(a)) for a in self.arrays]
        # To compile for a CPU needs a C++ compiler: many Macs have none.
        with use_backend("reference"), mx.stream(mx.cpu), uncompiled():
            expected = self.run(*map(mx.array, read))
            mx.eval(expected)
            errors = [
                rounding_error(*pair, self.terms, self.steps)
                for found in runs
                for pair in zip(found, expected, strict=True)
            ]
        # NaN is further than any number.
        return max(errors, key=lambda e: e[0] / (e[1] or 1) if e[0] <= e[1] else inf)

    def _given(self, arrays: Sequence[mx.array]) -> dict[str, Any]:
        left = iter(arrays)
        given: dict[str, Any] = mapped(lambda _: next(left), self.arguments)
        return given


def mapped(function: Callable[[mx.array], Any], tree: Any) -> Any:
    """Dictionaries, lists and tuples with a function of each array in them."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, mx.array) else leaf, tree)


def _results(found: Any) -> list[mx.array]:
    return [found] if isinstance(found, mx.array) else [*found]
