"""What a step of decoding leaves for the next one with the same caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from .cache_tail import Tail, advance, given_by, goes_on
from .ring_tail import RingTail
from .step_caches import Group


@dataclass
class Progress:
    """What a step leaves for the next one with the same caches.

    Attributes:
        following: arrays of positions.
        offsets: of a batch, as its caches have them.
        tail: of the caches that have one.
        rings: the tails of full rings, by the numbers of their caches.
        again: if all of them have it, what a token behind this one takes if nobody looks at them.
    """

    following: dict[Any, mx.array] = field(default_factory=dict)
    offsets: list[Any] = field(default_factory=list)
    tail: Tail | None = None
    rings: dict[int, RingTail] = field(default_factory=dict)
    again: Again | None = None


class Again(NamedTuple):
    """The next step with the same caches, which differs by what they hold alone.

    Attributes:
        key: of its graph, but for the caches.
        computed: what its graph gives.
        group: where the caches are.
        length: keys that they hold.
    """

    key: Any
    computed: Callable[..., list[Any]]
    group: Group
    length: int

    def run(self, key: Any, tokens: mx.array, own: list[Any], now: Progress) -> Any:
        """The logits, and the caches with the token; None if it is another step."""
        tail, at = now.tail, now.following.get(self.group.at)
        if key != self.key or tail is None or at is None or not goes_on(tail, own, self.length):
            return None
        logits, following, *rest = self.computed(tokens, [at], given_by(tail))
        tail = tail._replace(tails=rest[: 2 * len(own)], shown=rest[2 * len(own) :])
        length, now.following = self.length + 1, {self.group.later: following}
        advance(own, tail, [{"offset": length}] * len(own))
        now.tail, now.again = tail, self._replace(group=self.group.after(), length=length)
        return logits
