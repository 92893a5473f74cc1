"""Caches whose last tokens are dropped, so that the next step goes on by the same graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .append_buffers import kind_of
from .append_form import AppendForm
from .caches import put
from .engine import Steps, last_of, place_now
from .forms import Progress
from .twin import leaves

# Caches that drop tokens by their count alone.
_COUNTED = {"KVCache", "QuantizedKVCache", "PackedKVCache"}


def rewound(model: Any, caches: Sequence[Any], count: int, gone: mx.array | None = None) -> bool:
    """Whether the last tokens of caches were dropped so that the next step goes on as it would.

    Else they stay as they are: the last step with them has to be by a graph of the model, and they
    drop tokens by their count alone. ``count`` are those of the tokens taken since somebody last
    looked at the caches, ``gone`` by how many positions went back before, see :func:`moved_back`.
    """
    own = leaves(caches)
    if (found := _last(model, own)) is None:
        return False
    steps, last = found
    if (after := last.step.dropped(own, last.state, count, gone)) is None:
        return False
    state, items = after
    put(own, items)
    deque(map(dict.update, last.held.items, items), maxlen=0)
    steps.progress[own[0]] = last._replace(state=state, left=last.left + count)
    return True


def moved_back(
    model: Any, caches: Sequence[Any], count: mx.array, most: int, lengths: Sequence[int]
) -> bool:
    """Whether the next steps begin before the last tokens, whose number is not known here yet.

    So these are launched before the last one was read. Until :func:`rewound` is told the number,
    which is () int32 and at ``most`` so many, caches count all tokens, and nobody may look at them.
    The last step has to have append buffers, with which the next ones, of so many tokens each, go
    on.
    """
    own = leaves(caches)
    if (found := _last(model, own)) is None:
        return False
    steps, last = found
    if not isinstance(last.step, AppendForm) or not steps.is_of_now():
        return False
    if last.left < sum(lengths) or any(b.held < most for b in last.state.append_buffers):
        return False
    (batch, _), dtype, place = last.asked
    asked = (batch, lengths[0]), dtype, place_now()
    if place != asked[2] or (asked != last.asked and steps.behind(asked, own, last) is None):
        return False
    steps.progress[own[0]] = last._replace(state=last.step.back(last.state, count))
    return True


def goes_on(model: Any, caches: Sequence[Any]) -> bool:
    """Whether the last step with caches was by a graph, from which the next one goes on."""
    return _last(model, leaves(caches)) is not None


def _last(model: Any, own: list[Any]) -> tuple[Steps, Progress] | None:
    """The progress of caches that drop tokens by their count alone, and are as a step left them."""
    kinds = {kind_of(c).__name__ for c in own}
    return last_of(model, own) if kinds <= _COUNTED else None
