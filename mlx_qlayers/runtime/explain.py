"""Which path each operation took, why, and how often."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from .backend import undone

_FIGURE = re.compile(r"\d[\d,]*(\.\d+)?")


@dataclass(frozen=True)
class Decision:
    """One path that an operation took, why, and how often.

    Attributes:
        op: the operation's public name, or ``kernel NAME`` for launches.
        path: the backend, ``"reference"`` for stock operators, or what became of something else.
        reason: why.
        calls: how many times.
        evidence: what decided: a ``"rule"``, or what was ``"measured"``.
    """

    op: str
    path: str
    reason: str
    calls: int = 1
    evidence: str = "rule"

    def __str__(self) -> str:
        return f"{self.op}: {self.path} ({self.reason}), {self.calls} calls"


def aligned(rows: Sequence[Sequence[str]], numbers: bool = False) -> list[str]:
    """The lines of a table; columns begin at the same place or, of ``numbers``, end there."""
    justified = []
    for i, column in enumerate(zip(*rows, strict=True)):
        justify = str.rjust if numbers and i else str.ljust
        justified.append([justify(cell, max(map(len, column))) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*justified, strict=True)]


def significant(value: float) -> str:
    """A number with three significant digits, and none in powers of ten."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if abs(value) >= 1e-4 else f"{value:.2e}"


class Decisions(list[Decision]):
    """The result of :func:`explain`: a list that prints as a table.

    Decisions of one operation and path whose reasons differ in nothing but figures share a row;
    its reason is that of most calls.
    """

    def __str__(self) -> str:
        merged: dict[tuple[str, str, str, str], list[Decision]] = {}
        for each in self:
            key = each.op, each.path, each.evidence, _FIGURE.sub("#", each.reason)
            merged.setdefault(key, []).append(each)
        rows: list[tuple[str, ...]] = [("operation", "path", "calls", "evidence", "reason")]
        for key, alike in merged.items():
            most = max(alike, key=lambda each: each.calls)
            calls = sum(each.calls for each in alike)
            rows.append((*key[:2], str(calls), key[2], most.reason))
        return "\n".join(aligned(rows))

    __repr__ = __str__


class Row:
    """A line of :func:`explain` that counts.

    ``next(row.ticks)`` counts once, in one step of the interpreter, so that threads lose nothing
    without a lock; ``forgotten`` is how many of the calls do not count: a reset took them away, or
    another row stands for them.
    """

    __slots__ = ("forgotten", "key", "ticks")

    def __init__(self, op: str, path: str, reason: str, evidence: str) -> None:
        self.key = op, path, reason, evidence
        self.ticks, self.forgotten = itertools.count(), 0

    @property
    def calls(self) -> int:
        """All calls so far."""
        return int(repr(self.ticks)[6:-1])  # count(3): to read it must not advance it


_rows: dict[tuple[str, str, str, str], Row] = {}
_lock = threading.Lock()
# By thread, the rows that :func:`recording` collects.
collectors: dict[int, list[Row]] = {}
_noting: set[int] = set()  # threads whose notes are counted all the same


def row(op: str, path: str, reason: str, evidence: str = "rule") -> Row:
    """The row of a decision, made at first use."""
    key = op, path, reason, evidence
    with _lock:
        if key not in _rows:
            _rows[key] = Row(*key)
        return _rows[key]


def count(rows: tuple[Row, ...]) -> None:
    """Count rows once, or give them to :func:`recording` if this thread is inside it."""
    if collectors and (collected := collectors.get(threading.get_ident())) is not None:
        collected.extend(rows)
        return
    for each in rows:
        next(each.ticks)


def recount(rows: Sequence[Row], instead: Sequence[Row]) -> None:
    """Count rows in place of those that this thread has just counted."""
    if (collected := collectors.get(threading.get_ident())) is not None:
        del collected[len(collected) - len(rows) :]
    else:
        with _lock:
            for each in rows:
                each.forgotten += 1
    count(tuple(instead))


def note(op: str, path: str, reason: str, evidence: str = "rule") -> None:
    """Remember that ``op`` took ``path`` and why."""
    if threading.get_ident() in _noting:
        next(row(op, path, reason, evidence).ticks)
    else:
        count((row(op, path, reason, evidence),))


@contextmanager
def recording(notes: bool = True) -> Iterator[list[Row]]:
    """Collect the rows that would be counted in a ``with`` block, in this thread, uncounted.

    Without ``notes`` these count: of proofs, say, which others find made.
    """
    thread, rows = threading.get_ident(), list[Row]()
    before = collectors.get(thread)

    def end() -> None:
        if before is None:
            collectors.pop(thread, None)
            _noting.discard(thread)
        else:
            collectors[thread] = before

    with undone(end):
        collectors[thread] = rows
        if not notes:
            _noting.add(thread)
        yield rows


def explain(*, reset: bool = False) -> Decisions:
    """Which path each operation took since the start, why, and how many times.

    Kernels that were launched are listed too, under the name ``kernel ...``.

    Args:
        reset: forget the decisions after returning them.

    Returns:
        One :class:`Decision` for each operation, path and reason, in the order first seen. Printed
        they are a table, in which reasons that differ in figures alone share a row.

    Example:
        >>> with use_backend("reference"):
        ...     y = grid_sample(mx.ones((1, 4, 4, 3)), mx.zeros((1, 2, 2, 2)))
        >>> explain()
        operation    path       calls  evidence  reason
        grid_sample  reference  1      rule      asked for
    """
    decisions = Decisions()
    with _lock:
        for each in _rows.values():
            op, path, reason, evidence = each.key
            if (calls := each.calls - each.forgotten) > 0:
                decisions.append(Decision(op, path, reason, calls, evidence))
            if reset:
                each.forgotten += calls
    return decisions
