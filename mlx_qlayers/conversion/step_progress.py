"""What a step of decoding leaves for the next one with the same caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from ..decode.cache_tail import Tail, advance, as_left, following, given_by, held_by
from ..decode.ring_tail import RingTail
from .step_caches import Group


@dataclass
class Progress:
    """What a step leaves for the next one with the same caches.

    Attributes:
        following: arrays of positions.
        offsets: of a batch, as its caches have them.
        tail: of the caches that have one.
        rings: the tails of full rings, by the numbers of their caches.
        again: if all caches have it, what a token behind this one takes if nobody looks at them.
        left: how many more tokens are left to the model, and why.
    """

    left: int = 0
    reason: str = ""
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
        left: what they have.
    """

    key: Any
    computed: Callable[..., list[Any]]
    group: Group
    left: list[dict[str, Any]]

    def run(self, key: Any, tokens: mx.array, own: list[Any], now: Progress) -> Any:
        """The logits, and the caches with the token; None if it is another step."""
        tail, at = now.tail, now.following.get(self.group.at)
        if key != self.key or tail is None or at is None:
            return None
        _, start, held, _ = self.group.at
        if held == tail.tails[0].shape[2] or not as_left(own, self.left):
            return None
        paddings = [each["left_padding"] for each in self.left if "left_padding" in each]
        logits, later, *rest = self.computed(tokens, [at], given_by(tail, paddings))
        count, length = len(tail.tails), start + held + 1
        tails, now.offsets = rest[:count], rest[count:]
        counts: list[dict[str, Any]] = [{"offset": length}] * len(own)
        if paddings:
            counts = [{"offset": each, "_idx": length} for each in now.offsets]
        tail, now.following = following(tail, tails), {self.group.later: later}
        advance(own, tail, counts)
        now.tail, now.again = tail, self._replace(group=self.group.after(), left=held_by(own))
        return logits
