"""Looks up measurements for operations: configurations, and the faster path.

Answers are kept for an epoch: until results are saved or cleared, or a mode begins or ends.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, fields
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..measurements import entries as stored
from ..measurements.entries import COMPUTED, Entry, Evidence
from ..measurements.thresholds import Measured
from ..metal.record import Record
from ..metal.records import RECORDS
from ..runtime.backend import advance_epoch, backend, within
from ..runtime.backend import current as context
from ..runtime.backend import epoch as current
from ..runtime.explain import note
from ..runtime.versions import version_of

T = TypeVar("T")
# Questions that are remembered: a server sees any number of lengths.
_REMEMBERED = 4096


class Measurement(NamedTuple):
    """A measurement that was found for a record."""

    path: str  # as an Entry has it
    config: Any  # the kernel's fastest configuration
    evidence: Evidence  # where that comes from

    @property
    def gain(self) -> float | None:
        """How many times as fast as the stock operator the kernel was, if both were measured."""
        seconds = self.evidence.seconds or {}
        return seconds["stock"] / seconds["kernel"] if {"stock", "kernel"} <= {*seconds} else None


# Settings that ``with`` blocks change for their own thread or task.
_heuristics_only: ContextVar[bool] = ContextVar("heuristics_only", default=False)
_collected: ContextVar[dict[Record, None] | None] = ContextVar("collected", default=None)


def configure(family: str, device: str, *key: Hashable) -> Any:
    """The configuration of a kernel by its record's key: the tuned one or the heuristic's."""
    best = found(family, *key, device=device)
    return RECORDS[family](*key).heuristic(device) if best is None else best.config


def found(family: str, *key: Hashable, device: str | None = None) -> Measurement | None:
    """The measurement for a key of a family's record; None if there is none."""
    if (asked := _collected.get()) is not None:
        asked[RECORDS[family](*key)] = None
    if _heuristics_only.get() or context.get().invariant or context.get().integers:
        return None
    return _found(current.number, family, device or backend(), key)


def decided(best: Measurement | None, reason: str | None, wins: str = "kernel") -> str | None:
    """Why ``auto`` leaves a kernel for another path; None or ``""`` where it does not.

    ``reason`` is the reason by rules, ``wins`` the path by which the kernel was measured.
    """
    if _collected.get() is not None:  # what is collected is what the kernels would be asked
        return None
    if best is None or best.path == "uncompared":
        return reason
    return Measured("" if best.path == wins else best.evidence)


def collected_records() -> AbstractContextManager[dict[Record, None]]:
    """Collect what operations ask inside a ``with`` block, each record once."""
    return _afresh(_collected, {})


def uncollected() -> AbstractContextManager[None]:
    """Inside a ``with`` block, no records are collected: nothing of them would run."""
    return within(_collected, None)


def untuned() -> AbstractContextManager[bool]:
    """Inside a ``with`` block nothing that was tuned counts, for this thread or task."""
    return _afresh(_heuristics_only, True)


def by_heuristics() -> AbstractContextManager[bool]:
    """Likewise, for a plan that is kept as if it were tuned."""
    return within(_heuristics_only, True)


@contextmanager
def _afresh(variable: ContextVar[Any], value: T) -> Iterator[T]:
    """Let a variable have another value, and have plans made anew for it and after it."""
    try:
        with within(variable, value):
            advance_epoch()
            yield value
    finally:
        advance_epoch()


@lru_cache(maxsize=_REMEMBERED)
def _found(epoch: int, family: str, device: str, key: tuple[Hashable, ...]) -> Measurement | None:
    record, name = RECORDS[family](*key), stored.file_of(device)
    names = stored.devices(device) if record.of_backend else (name,) if name else ()
    return lookup(record, *names) or _of_larger(record, names, device)


def _of_larger(record: Record, names: Sequence[str], device: str) -> Measurement | None:
    """This machine's measurement of the next larger key, if its kernel is the same."""
    for larger in record.larger():
        if (best := lookup(larger, *names)) is not None:
            # To unpack a matrix first may not pay for fewer rows.
            compared = best.path not in ("dequantized", "uncompared")
            here, config = best.evidence.source == "measured here", record.heuristic(device)
            if not (compared and here and type(config) is type(best.config)):
                return None
            same = record.variant(config) == larger.variant(best.config)
            return best._replace(config=config) if same else None
    return None


def lookup(record: Record, *devices: str) -> Measurement | None:
    """The entry stored for a key under names of devices, if it can be trusted."""
    found = stored.look_up(record.key, *devices)
    if found is None or (entry := found[0]).config is None:
        return None
    try:
        config = _kind_of(entry, record)(**entry.config)
        _check(config, record, found[1].device)
    except (ValueError, TypeError) as error:
        note("tuning", "ignored", f"{record.key}: {error}")
        return None
    note("tuning", entry.path, f"{record.key}: {config}", "measured")
    return Measurement(entry.path, config, found[1])


def _check(config: Any, record: Record, device: str) -> None:
    """Results would be wrong by what no search can have tried: somebody wrote it into the file."""
    try:
        record.check(config)
    except ValueError as error:
        _say(f"the tuning result {record.key} of {device} is ignored: {error}")
        raise


@cache
def _say(text: str) -> None:
    print(f"mlx-qlayers: {text}", file=sys.stderr)


def _kind_of(entry: Entry, record: Record) -> type[Any]:
    """The class of an entry's configuration, if it is of this MLX and these kernels."""
    if entry.path == COMPUTED:
        raise ValueError("was computed, not measured")
    # A configuration alone may hold whatever becomes of the text and of MLX.
    holds = entry.path == "uncompared" and not entry.source
    if entry.mlx != version_of("mlx") and not holds:
        raise ValueError(f"measured with MLX {entry.mlx}, this is {version_of('mlx')}")
    if entry.source != record.source and not holds:
        raise ValueError("measured with another version of the kernel")
    wanted = {kind: sorted(field.name for field in fields(kind)) for kind in record.configs}
    for kind, names in wanted.items():
        if names == sorted(entry.config or ()):
            return kind
    every = " or ".join(map(str, wanted.values()))
    raise ValueError(f"has the fields {sorted(entry.config or ())}, not {every}")


def entry_of(
    record: Record,
    config: Any,
    path: str,
    paths: Mapping[str, float],
    heuristic: float | None = None,
    tried: int = 1,
) -> Entry:
    """The entry for a measurement that ends now."""
    return Entry(
        config=asdict(config),
        path=path,
        seconds=paths[path],
        heuristic=heuristic or paths.get("kernel", paths[path]),
        tried=tried,
        source=record.source,
        mlx=version_of("mlx"),
        paths=paths,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    )
