"""Caches with which a graph of a step is tried out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import mlx.core as mx

from .step_kinds import Nested, Rows, Static, with_rows
from .step_slots import Step

# Rows of buffers that are tried out, of which the first three count.
TRIAL_ROWS = 16


def trial(
    static: Sequence[Static], rows: int, more: int = 0, tokens: Callable[[int], int] = lambda i: 0
) -> Step:
    """A step outside of a graph.

    Args:
        static: what a graph is made for.
        rows: of buffers, as many for each cache.
        more: rows besides these.
        tokens: how many more than three count, of each cache.
    """
    numbers = count()
    # Each cache is at a position of its own.
    own = [_in_group(with_rows(each, rows + more), numbers) for each in static]
    held = [3 + tokens(i) for i in range(next(numbers))]
    at = [mx.array([n, n, n + 10]) for n in held]
    return Step(own, at, [a for each in own for a in examples(each, 0.25)])


def _in_group(static: Static, numbers: Iterator[int]) -> Static:
    if isinstance(static, Nested):
        return Nested(tuple(_in_group(part, numbers) for part in static.parts))
    if static is None:
        return None
    number = next(numbers)
    return static._replace(group=number) if isinstance(static, Rows) else static


def examples(static: Static, filling: float) -> list[mx.array]:
    """Arrays of a cache whose first three rows count."""
    key = mx.random.key(0)
    if isinstance(static, Rows):
        arrays, batch = list[Any](), static.shapes[0][0]
        settings = dict(static.settings)
        for b, h, rows, width in static.shapes:
            written = mx.random.normal((b, h, 3, width), key=key)
            rest = mx.full((b, h, rows - 3, width), filling)
            buffer = mx.concatenate([written, rest], axis=2).astype(static.dtype)
            if "bits" in settings:
                packed = mx.quantize(buffer, settings["group_size"], settings["bits"])
                arrays.append(tuple(packed))
            else:
                arrays.append(buffer)
        positions = [mx.full((batch,), 3), mx.zeros((batch,), mx.int32)]
        return arrays + positions * hasattr(static.kind, "finalize")
    if isinstance(static, Nested):
        return [a for part in static.parts for a in examples(part, filling)]
    shapes = [each for each in static.shapes if each is not None] if static else []
    return [(0.1 * mx.random.normal(s, key=key)).astype(dtype) for s, dtype in shapes]
