"""Thresholds and gains that rules go by, from ``data/`` and the user's own files.

Answers are kept for an epoch: until results are saved or cleared, or a mode begins or ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..runtime.backend import backend
from ..runtime.backend import epoch as current
from ..runtime.explain import significant
from . import entries as stored
from .entries import Values

# Whose thresholds hold on all devices of a backend that have none of their own.
_OTHERS = {"cuda": "sm_90", "host": "cpu", "metal": "metal"}


@dataclass(frozen=True)
class Evidence:
    """Where an answer comes from.

    Attributes:
        source: ``"measured here"``, or ``"shipped result"`` of another machine.
        device: that it was measured on.
        date: when.
        command: by which command.
        seconds: of each path, where paths were compared.
    """

    source: str
    device: str
    date: str = ""
    command: str = ""
    seconds: Mapping[str, float] | None = None

    def __str__(self) -> str:
        where = "" if self.source == "measured here" else f" of {self.device}"
        when = f", {self.date}" if where and self.date else ""
        seconds = (self.seconds or {}).items()
        times = ", ".join(f"{name} {significant(1e6 * s)} us" for name, s in seconds)
        return f"{self.source}{where}{when}" + (f": {times}" if times else "")


def threshold(name: str, *key: Hashable, device: str | None = None) -> Any:
    """A threshold or a gain that was measured; None where it was not, for this device.

    Args:
        name: of the entry in ``data/<device>.json``.
        key: which of its values, if it has several.
        device: ``"metal"``, ``"cuda"`` or ``"host"``; by default the current backend.

    Example:
        >>> threshold("grid_sample_gain", "bilinear", device="host")
        1.8
    """
    values = _values(current.number, name, device or backend())[0]
    return values.get(" ".join(map(str, key))) if key and isinstance(values, Mapping) else values


def gain(name: str, size: int, *key: Hashable) -> float | None:
    """How many times as fast as the reference a kernel is on a CPU: at the next smaller size.

    Args:
        name: of an entry whose values have a list of ``sizes``, and lists of gains at them.
        size: of the problem, as rows; below the first that was measured, that one counts.
        key: which list.

    Example:
        >>> gain("qmv_gain", 3, "affine", 4) == gain("qmv_gain", 2, "affine", 4)
        True
    """
    gains = threshold(name, *key, device="host")
    if gains is None:
        return None
    at = bisect_right(threshold(name, "sizes", device="host"), size) - 1
    return float(gains[max(0, at)])


def evidence_of(name: str, *, device: str | None = None) -> Evidence | None:
    """Where a threshold comes from."""
    return _values(current.number, name, device or backend())[1]


def source_of(*names: str) -> str:
    """What a choice rests on that went by thresholds: the first that the current backend has.

    Returns:
        ``"shipped result"``, ``"measured here"``, or ``"rule"`` where there is none of them.
    """
    found = (evidence_of(name) for name in names)
    return next((each.source for each in found if each), "rule")


@lru_cache(maxsize=4096)
def _values(epoch: int, name: str, device: str) -> tuple[Any, Evidence | None]:
    other = _OTHERS.get(device, device)
    own = stored.file_of(device) or other
    for file in (own, other):
        entry, shipped = stored.entries(file, current.number).get(name, (None, False))
        if isinstance(entry, Values) and (shipped or file == own):
            source = "shipped result" if shipped else "measured here"
            return _frozen(entry.values), Evidence(source, file, entry.date, entry.command)
    return None, None


def _frozen(value: Any) -> Any:
    """With tuples for lists."""
    if isinstance(value, Mapping):
        return {key: _frozen(each) for key, each in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
