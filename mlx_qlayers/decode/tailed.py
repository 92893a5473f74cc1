"""A step as one compiled function, whose attention takes tails, for caches that grow by tokens.

The caches' buffers are only read meanwhile: see :mod:`.cache_tail`. Where a step leaves off, the
next one with the same caches goes on, as long as nobody looked at them or changed them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..runtime.backend import Mode, mode
from ..runtime.windows import halves, joined
from .cache_tail import (
    Tail,
    following,
    given_by,
    held_by,
    kind_of,
    one_token,
    positions,
    positions_of,
    tail_of,
    watch,
    watched_kind,
    with_tickets,
)
from .cache_tail import arrays_of as arrays_in
from .caches import arrays_of, changes, put
from .capture import Captured, Unsupported
from .emit import Program
from .ring_tail import RingTail, kept, ring_positions, ring_tail
from .rules import fused
from .rules.steps import Tails

_COUNTS = ("offset", "_idx")
# Of a batch, by sequences.
_OF_BATCH = ("offset", "left_padding")
_NAMES = ("cache.{}.keys", "cache.{}.values", "tail.{}.keys", "tail.{}.values", "tickets.{}")


class Tailed:
    """A captured step whose positions are arrays, for one batch size.

    Args:
        captured: the step.
        batch: sequences.
        keys: of the caches, what the capture is for.

    Attributes:
        plain: the numbers of the caches that have a tail together.
        rings: those of rotating caches, which have one each.

    Raises:
        Unsupported: something else than attention depends on positions.
    """

    def __init__(self, captured: Captured, batch: int, keys: Sequence[tuple[Any, ...]]) -> None:
        graph = fused(captured.graph, Tails(keys, captured.names))
        self.captured, self.batch = captured, batch
        tailed = {int(name.split(".")[1]) for name in graph.outputs if name.startswith("tail.")}
        self.rings = sorted(i for i in tailed if keys[i][0] == "RotatingKVCache")
        self.plain = sorted(tailed - {*self.rings})
        self.tailed = [*self.plain, *self.rings]
        self.program = Program(graph, batch, captured.weights)
        if self.program.dynamic:
            raise Unsupported("its code computes with positions")
        self.given = [name for _, name in self.program.inputs]
        self.results = [name for name in graph.outputs if name != "logits"]
        self.tails = [f"tail.{i}.{name}" for i in self.plain for name in ("keys", "values")]
        self.compiled = mx.compile(self._run)

    def _run(self, at: mx.array | None, given: Any, arrays: dict[str, mx.array]) -> list[Any]:
        """Logits, positions of the next token, tails, and what changed besides."""
        per, arrays = len(given) // max(1, len(self.plain)), {**arrays}
        if at is not None:
            arrays |= {name: at for name in self.given if name.startswith("at.")}
        for i, number in enumerate(self.plain):
            keys, values, *tails, tickets = given[per * i : per * i + per]
            if len(tails) == 1:
                tails = [*halves(tails[0])]
            names = (name.format(number) for name in _NAMES)
            arrays |= zip(names, (keys, values, *tails, tickets), strict=True)
        with mode(Mode.INFERENCE):
            made = self.program.run(arrays, {})
        tails = [made.pop(name) for name in self.tails]
        if per == 4:
            tails = [joined(*tails[i : i + 2]) for i in range(0, len(tails), 2)]
        later = at if at is None else at + one_token(at.size)
        return [made.pop("logits"), later, tails, made]

    def run(self, tokens: mx.array, own: Sequence[Any], last: Progress | None) -> Any:
        """The logits, and what the next step with the same caches goes on with.

        Raises:
            Unsupported: caches hold different numbers of tokens, or are too small.
        """
        some, held = [own[i] for i in self.plain], [vars(own[i]) for i in self.plain]
        lengths = {each.get("_idx", each["offset"]) for each in held}
        if len(lengths) > 1:
            raise Unsupported("caches hold different numbers of tokens")
        tail, at, given = None, None, list[Any]()
        for length in lengths:
            before = last and last.tail
            tail = with_tickets(tail_of(before, some, length))
            goes_on = last is not None and before is not None and tail.start == before.start
            at = last.at if last is not None and goes_on else _at(tail, length, held)
            given = given_by(tail, [])
        others = [None if i in self.tailed else c for i, c in enumerate(own)]
        rings = {i: ring_tail(last.rings.get(i) if last else None, own[i]) for i in self.rings}
        arrays = {**arrays_of(others), **self._of_rings(rings, own), "tokens": tokens}
        for i, each in zip(self.plain, held, strict=True):
            arrays |= {
                f"cache.{i}.{n}": each[n] for n in _OF_BATCH if isinstance(each.get(n), mx.array)
            }
        logits, later, tails, made = self.compiled(at, given, arrays)
        new = {i: [made.pop(f"tail.{i}.{name}") for name in ("keys", "values")] for i in rings}
        known = self.captured.names
        names = ((i, n) for i in self.tailed for n in _COUNTS if f"{i}.{n}" in known)
        at_names = {known[f"{i}.{n}"]: vars(own[i])[n] for i, n in names}
        items = changes(own, made, self.captured.counts, at_names)
        for i in self.rings:
            row, size = vars(own[i])["_idx"], vars(own[i])["max_size"]
            items[i]["_idx"] = (vars(own[i])["keep"] if row == size else row) + 1
        if tail is not None:
            tail = following(tail, tails)
            pairs = zip(tail.held[::2], tail.held[1::2], strict=True)
            for i, (keys, values) in zip(self.plain, pairs, strict=True):
                items[i] |= {"keys": keys, "values": values}
        watch([own[i] for i in self.plain])
        put(own, items)
        after = {i: kept(ring, new[i], own[i]) for i, ring in rings.items() if ring is not None}
        return logits, Progress(self, tail, later, after, held_by(own))

    def _of_rings(
        self, rings: Mapping[int, RingTail | None], own: Sequence[Any]
    ) -> dict[str, mx.array]:
        """What a graph takes of rotating caches."""
        arrays: dict[str, mx.array] = {}
        for i, ring in rings.items():
            if ring is None:
                raise Unsupported("a rotating cache is tiny")
            each = (*ring.buffers, *ring.tails, ring.tickets)
            arrays |= zip((name.format(i) for name in _NAMES), each, strict=True)
            if f"ring.{i}" in self.given:
                size, offset = (vars(own[i])[name] for name in ("max_size", "offset"))
                arrays[f"ring.{i}"] = ring_positions(ring, size, offset, self.batch)
        return arrays


def _at(tail: Tail, length: int, held: Sequence[dict[str, Any]]) -> mx.array:
    """Where caches are that have a tail together.

    Raises:
        Unsupported: sequences of a batch have other positions in some of them.
    """
    if "_idx" not in held[0]:
        return positions(tail.start, length - tail.start, len(arrays_in(tail.buffers[0])[0]))
    for name in _OF_BATCH:
        whole = mx.stack([each[name] for each in held])
        if not (whole == whole[:1]).all().item():
            raise Unsupported("caches hold different numbers of tokens")
    return positions_of(tail.start, length - tail.start, held[0]["offset"])


class Progress(NamedTuple):
    """What a step leaves for the next one with the same caches.

    Attributes:
        step: which goes on.
        tail: of the caches that have one together.
        at: the positions of the next token in it.
        rings: the tails of rotating caches, by their numbers.
        left: what all caches have.
    """

    step: Tailed
    tail: Tail | None
    at: mx.array | None
    rings: dict[int, RingTail]
    left: list[dict[str, Any]]

    def holds(self, own: Sequence[Any]) -> bool:
        """Whether the caches are as the step left them, and nobody took keys or values."""
        try:  # dicts compare what is not identical, and arrays have no truth value
            same = [*map(vars, own)] == self.left
        except Exception:
            return False
        some = [own[i] for i in self.step.tailed]
        return same and all(type(c) is watched_kind(kind_of(c)) for c in some)


def released(own: Sequence[Any]) -> None:
    """Let caches hold their keys and values by themselves."""
    for c in own:
        if "_kind" in vars(type(c)):
            _ = c.keys
