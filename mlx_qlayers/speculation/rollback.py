"""Caches go back to where they were: whatever they hold, after tokens that were not accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..decode.append_buffers import kind_of, released
from ..decode.caches import RINGS, change
from ..decode.rewinding import goes_on, moved_back, rewound
from ..decode.twin import leaves

# Models whose masks of several tokens have another window than their rings.
_OTHERWISE = ("plamo3",)


class Checkpoint:
    """Caches before they take some tokens.

    Rows of keys and values are dropped from the end. A ring that took several tokens at once is
    longer than its window and in the order of its tokens, so that it can be cut, too. States of
    recurrent layers have no rows: they are kept as they were, and with them all other caches go
    back to before the first of the tokens, which come one at a time (``singly``) or at once.
    ``gone`` is by how many of them positions went back before that was known here, if they did.
    """

    def __init__(
        self, model: Any, caches: Sequence[Any], length: int, singly: bool = False
    ) -> None:
        self.gone: mx.array | None = None
        self.model, self.own, self.length = model, leaves(caches), length
        self.singly = singly or length == 1
        kinds = [kind_of(c).__name__ for c in self.own]
        kept = [not self._is_cut(c, kind) for c, kind in zip(self.own, kinds, strict=True)]
        # Arrays that a state goes back with are kept, too, unless it has counts alone.
        self.kept: list[Any] = [None] * len(kept)
        if any(kept):
            kept = [k or kind in RINGS for k, kind in zip(kept, kinds, strict=True)]
            released([c for c, k in zip(self.own, kept, strict=True) if k])
            pairs = zip(self.own, kept, strict=True)
            self.kept = [_copied(vars(c)) if k else None for c, k in pairs]
        self.whole = any(kept)

    def back(self, rejected: Sequence[int]) -> list[int]:
        """Drop tokens of each sequence; how many were dropped, which are all where states are.

        The rows of a batch end where they end for all: those of a sequence that drops more than
        others move behind more padding.
        """
        dropped = [self.length if self.whole and n else n for n in rejected]
        least = min(dropped)
        more = [n - least for n in dropped]
        if not any(more):
            asked = least or self.gone is not None
            if asked and not rewound(self.model, self.own, least, self.gone):
                for c, before in zip(self.own, self.kept, strict=True):
                    self._drop(c, before, least)
            return dropped
        shift, back = mx.array(more), mx.array(dropped)
        for c, before in zip(self.own, self.kept, strict=True):
            if before is not None and kind_of(c).__name__ == "ArraysCache":
                c.cache = [
                    now if then is None else mx.where(_rows(back > 0, now), then, now)
                    for then, now in zip(before["cache"], c.cache, strict=True)
                ]
                continue
            self._drop(c, None, least)
            change(c, lambda each: _rolled(each, shift))
            c.offset, c.left_padding = c.offset - shift, c.left_padding + shift
        return dropped

    def moves_back(self, count: mx.array, *lengths: int) -> bool:
        """Whether the next steps, of so many tokens, begin before the last ``count`` () tokens.

        Then they can be launched before that is known here; :meth:`back` is to be told, too.
        """
        if not self.whole and moved_back(self.model, self.own, count, self.length, lengths):
            self.gone = count
        return self.gone is not None

    def is_by_a_graph(self) -> bool:
        """Whether its tokens were taken where these before them end, and not by the model's code.

        That takes them behind all tokens that caches count; so they are dropped.
        """
        if not (found := goes_on(self.model, self.own)):
            self.back([self.length])
        return found

    def _drop(self, c: Any, before: Any, count: int) -> None:
        if not count:
            return
        if before is not None:
            vars(c).update(_copied(before))
        elif kind_of(c).__name__ in RINGS and not self.singly:
            _cut(c, count)
        else:
            c.trim(count)

    def _is_cut(self, c: Any, kind: str) -> bool:
        """Whether tokens can be dropped from the end of a cache."""
        if kind not in RINGS:
            return bool(c.is_trimmable())
        offset: int = vars(c).get("_offset", c.offset)
        return not self.singly or offset + self.length < c.max_size


def longest(model: Any, caches: Sequence[Any]) -> int | None:
    """The most tokens that a step can verify; None if caches set no limit.

    A full ring that keeps its first rows takes several tokens otherwise than one by one.
    """
    alike = getattr(model, "model_type", None) not in _OTHERWISE
    rings = [c for c in leaves(caches) if kind_of(c).__name__ in RINGS and hasattr(c, "keep")]
    rings = [c for c in rings if c.keep or not alike]
    return min((max(c.max_size - c.offset, 1) for c in rings), default=None)


def _cut(c: Any, rows: int) -> None:
    """Drop rows of a ring that has just taken more tokens than one."""
    change(c, lambda each: each[..., :-rows, :])
    c._idx -= rows
    c.offset = c.offset - rows
    if "_offset" in vars(c):
        c._offset -= rows


def _rows(mask: mx.array, like: mx.array) -> mx.array:
    """A mask of sequences, with the axes of an array behind."""
    return mask.reshape(-1, *[1] * (like.ndim - 1))


def _rolled(x: mx.array, shift: mx.array) -> mx.array:
    """Rows (B, H, S, D) of each sequence further on."""
    rows = (mx.arange(x.shape[2]) - shift[:, None]) % x.shape[2]
    return mx.take_along_axis(x, rows[:, None, :, None], axis=2)


def _copied(value: Any) -> Any:
    """Attributes whose arrays nobody else changes."""
    if isinstance(value, mx.array):
        return mx.array(value)
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value
