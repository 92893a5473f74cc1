"""Thresholds and gains that rules go by, from ``data/`` and the user's own files.

Answers are kept for an epoch: until results are saved or cleared, or a mode begins or ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..runtime.backend import backend
from ..runtime.backend import epoch as current
from ..runtime.explain import note
from .entries import Evidence, devices, look_up


class Measured(str):
    """Why a rule prefers stock operators, by a threshold; ``""`` where it prefers the kernel."""


def threshold(name: str, *key: Hashable, device: str | None = None) -> Any:
    """The value of an entry in ``data/<device>.json``; None if this device has none.

    ``key`` selects one of several values; ``device`` is by default the current backend.
    """
    values, _ = _values(current.number, name, device or backend())
    return values.get(" ".join(map(str, key))) if key and isinstance(values, Mapping) else values


def tabled(name: str, *key: Hashable, device: str | None = None) -> Any:
    """The same for a launcher, whose choice of kernel or tiles :func:`explain` names by it."""
    if (found := _values(current.number, name, device or backend())[1]) is not None:
        note("tuning", "table", f"{name}: {found}", "measured")
    return threshold(name, *key, device=device)


def gain(name: str, size: int, *key: Hashable) -> float | None:
    """The speedup over the reference on a CPU, at the next smaller of the measured sizes."""
    gains = threshold(name, *key, device="host")
    if gains is None:
        return None
    at = bisect_right(threshold(name, "sizes", device="host"), size) - 1
    return float(gains[max(0, at)])


def row_of(table: Sequence[tuple[float, Any]], size: float) -> Any:
    """The second element of the first row of a table whose first is not below a size."""
    return next((each for largest, each in table if size <= largest), None)


@lru_cache(maxsize=4096)
def _values(epoch: int, name: str, device: str) -> tuple[Any, Evidence | None]:
    entry, evidence = look_up(name, *devices(device)) or (None, None)
    return entry and _frozen(entry.values), evidence


def _frozen(value: Any) -> Any:
    """With tuples for lists."""
    if isinstance(value, Mapping):
        return {key: _frozen(each) for key, each in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
