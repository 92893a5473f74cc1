"""A step as one compiled function, whose attention takes tails, for caches that grow by tokens.

The caches' buffers are only read meanwhile: see :mod:`.cache_tail`. Where a step leaves off, the
next one with the same caches goes on, as long as nobody looked at them or changed them.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    tail_of,
    watch,
    watched_kind,
    with_tickets,
)
from .caches import arrays_of, changes, put
from .capture import Captured, Unsupported
from .emit import Program
from .rules import fused

_NAMES = ("cache.{}.keys", "cache.{}.values", "tail.{}.keys", "tail.{}.values", "tickets.{}")


class Tailed:
    """A captured step whose positions are arrays, for one batch size.

    Attributes:
        tailed: the numbers of the caches that have a tail.

    Raises:
        Unsupported: something else than attention depends on positions.
    """

    def __init__(self, captured: Captured, batch: int) -> None:
        graph = fused(captured.graph, by_tails=True)
        self.captured, self.batch = captured, batch
        self.tailed = sorted({int(n.split(".")[1]) for n in graph.outputs if n[:5] == "tail."})
        self.program = Program(graph, batch, captured.weights)
        if self.program.dynamic or not self.tailed:
            raise Unsupported("its code computes with positions")
        self.others = [
            name for _, name in self.program.inputs if not _is_of_tail(name, self.tailed)
        ]
        self.at = [name for name in self.others if name.startswith("at.")]
        self.others = [name for name in self.others if not name.startswith("at.")]
        self.results = [n for n in graph.outputs if n[:5] != "tail." and n != "logits"]
        self.compiled = mx.compile(self._run)

    def _run(self, at: mx.array, given: Sequence[Any], others: Sequence[mx.array]) -> list[Any]:
        """Logits, positions of the next token, tails, and what changed of other caches."""
        per, arrays = len(given) // len(self.tailed), dict(zip(self.others, others, strict=True))
        arrays |= dict.fromkeys(self.at, at)
        for i, number in enumerate(self.tailed):
            keys, values, *tails, tickets = given[per * i : per * i + per]
            if len(tails) == 1:
                tails = [*halves(tails[0])]
            names = (name.format(number) for name in _NAMES)
            arrays |= zip(names, (keys, values, *tails, tickets), strict=True)
        with mode(Mode.INFERENCE):
            made = self.program.run(arrays, {})
        tails = [made[f"tail.{i}.{name}"] for i in self.tailed for name in ("keys", "values")]
        if per == 4:
            tails = [joined(*tails[i : i + 2]) for i in range(0, len(tails), 2)]
        later = at + one_token(at.size)
        return [made["logits"], later, *tails, *(made[name] for name in self.results)]

    def run(
        self, tokens: mx.array, own: Sequence[Any], last: Progress | None
    ) -> tuple[Any, Progress]:
        """The logits, and what the next step with the same caches goes on with."""
        some = [own[i] for i in self.tailed]
        length = vars(some[0])["offset"]
        tail = with_tickets(tail_of(last and last.tail, some, length))
        goes_on = last is not None and last.tail is not None and tail.start == last.tail.start
        at = last.at if last and goes_on else positions(tail.start, length - tail.start, self.batch)
        arrays = arrays_of([c if i not in self.tailed else None for i, c in enumerate(own)])
        arrays["tokens"] = tokens
        others = [arrays[name] for name in self.others]
        logits, later, *rest = self.compiled(at, given_by(tail, []), others)
        count = len(tail.tails)
        tail = following(tail, rest[:count])
        outputs = dict(zip(self.results, rest[count:], strict=True))
        values = {f"{i}.offset": length for i in self.tailed}
        items = changes(own, outputs, self.captured.counts, values)
        for i, (keys, cached) in enumerate(zip(tail.held[::2], tail.held[1::2], strict=True)):
            items[self.tailed[i]] |= {"keys": keys, "values": cached}
        watch(some)
        put(own, items)
        return logits, Progress(self, tail, later, held_by(own))


class Progress(NamedTuple):
    """What a step leaves for the next one with the same caches.

    Attributes:
        step: which goes on.
        tail: of the caches that have one.
        at: the positions of the next token.
        left: what all caches have.
    """

    step: Tailed
    tail: Tail
    at: mx.array
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


def _is_of_tail(name: str, tailed: Sequence[int]) -> bool:
    kind, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return kind in ("tail", "tickets") or (kind == "cache" and int(number) in tailed)
