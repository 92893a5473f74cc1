"""A step as one compiled function whose attention takes append buffers.

It runs the tokens of a step with caches that grow by tokens. The buffers of the caches are
only read meanwhile, see :mod:`.append_buffers`. The next step with the same caches goes on where
this one ended, as long as nobody looked at the caches or changed them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx

from ..ops.attention_step import MIN_SEMAPHORES, why_not
from ..options import StepCall
from ..runtime.arena import View, halves, joined
from ..runtime.backend import requested
from .append_buffers import (
    AppendBuffer,
    append_buffer_of,
    arrays_of,
    positions_for,
    positions_of,
    rows_side_by_side,
    tokens_on,
    watch,
)
from .caches import RECHECK_AFTER, places
from .caches import arrays_of as named
from .capture import Captured, Unsupported
from .forms import Form, Progress
from .graph import Graph
from .rules.attention_step import TracedCaches
from .weights import traced

_NAMES = ("keys", "values")
# With how many rows of a cache it is asked whether there is a kernel.
_TYPICAL_ROWS = 4096


class AppendState(NamedTuple):
    """The arrays that a step's compiled function takes and gives."""

    append_buffers: list[AppendBuffer]  # of the groups of caches
    at: list[mx.array]  # the positions of the next tokens in them
    fixed: list[mx.array]  # other arrays that it takes
    states: list[mx.array]  # other arrays that it changed


class AppendForm(Form):
    """A captured step whose positions are arrays, for one batch size.

    Its graph is that after the rules, with append buffers, and one for all batch sizes. ``caches``
    are what rules know of the caches, and ``weights`` where arrays of the model lie. It raises
    ``Unsupported`` where something else than attention depends on positions.
    """

    def __init__(
        self,
        captured: Captured,
        graph: Graph,
        batch: int,
        caches: TracedCaches,
        weights: Sequence[View] = (),
    ) -> None:
        super().__init__(captured, graph, batch)
        self.weights, self.caches = weights, caches
        if self.program.dynamic:
            raise Unsupported("its code computes with positions")
        if self.length > 1 and self.states:
            raise Unsupported("tokens that are dropped take states back, and all rows with them")
        # The numbers of caches that hold as many tokens, which have an append buffer together.
        groups: dict[int, list[int]] = {}
        for number in sorted({int(n.split(".")[1]) for n in graph.outputs if "append." in n}):
            groups.setdefault(caches.first(number), []).append(number)
        self.groups = [*groups.values()]
        counting = self._counted(captured, caches)
        self.counting = [counting[first] for first in groups]
        # Inputs that each step replaces, and ``fixed`` ones.
        self.at = [f"at.{first}" for first in groups]
        self.appended = [f"append.{i}.{n}" for i in chain(*self.groups) for n in _NAMES]
        self.buffers = [*_buffers(self.groups, caches.keys)]
        moving = {"tokens", *self.at, *self.appended, *self.states, *self.buffers}
        self.fixed = [name for _, name in self.program.inputs if name not in moving]
        read = places(name for name in self.fixed if name.startswith("cache."))
        self.lists = sorted({*self.lists, *((i, name) for i, name, at in read if at is not None)})
        calls = [StepCall.of(node.src) for node in graph.nodes if node.op == "AttentionStep"]
        if reason := next(filter(None, (_why_not(call, batch) for call in calls)), None):
            raise Unsupported(reason)
        # Attention takes at most one of a query.
        queries = (call.q.shape[1] * call.q.shape[2] // call.width for call in calls)
        self.semaphores = max(MIN_SEMAPHORES, batch * max(queries, default=0))
        self.compiled = mx.compile(self._run)

    def _counted(self, captured: Captured, caches: TracedCaches) -> dict[int, list[str]]:
        """The counts of each cache that go on with the tokens."""
        found: dict[int, list[str]] = {number: [] for number in chain(*self.groups)}
        for (number, name), count in zip(self.counts, captured.counts.values(), strict=True):
            begun = name == "_idx" and caches.keys[number][1] == "begins"
            more = self.length
            if number not in found or not (begun or count == caches.counter(number, name, more)):
                raise Unsupported("a cache without an append buffer counts, or in another way")
            found[number].append(name)
        return found

    def _run(self, tokens: mx.array, *given: Any) -> list[Any]:
        """Logits; positions of the next tokens, append buffers and states."""
        fixed, buffers, at, arrays, states = given
        buffers = [a for some in buffers for buffer in some for a in arrays_of(buffer)]
        is_joined = len(arrays) < len(self.appended)
        # Arrays that leave as they came in must not share a buffer.
        with traced([*fixed, *buffers, *arrays, *states], self.weights):
            apart = [y for x in arrays for y in halves(x)] if is_joined else arrays
            names = self.fixed, self.buffers, self.at, self.appended, self.states
            pairs = zip(chain(*names), [*fixed, *buffers, *at, *apart, *states], strict=True)
            made = self.program.run({"tokens": tokens, **dict(pairs)}, {})
            new = [made[name] for name in self.appended]
            if is_joined:
                new = [joined(*new[i : i + 2]) for i in range(0, len(new), 2)]
        later = [each + tokens_on(each.size, self.length) for each in at]
        return [made["logits"], later, new, [made[name] for name in self.states]]

    def dropped(
        self, own: Sequence[Any], state: AppendState, count: int, gone: mx.array | None = None
    ) -> tuple[AppendState, list[dict[str, Any]]] | None:
        if any(each.held < count for each in state.append_buffers):
            return None
        items = [{"offset": vars(c)["offset"] - count} for c in own]
        old = state.append_buffers
        beside = [b._replace(held=b.held - count, left=b.left + count) for b in old]
        self._hold(items, beside)
        state = self.back(state, count if gone is None else count - gone)
        return state._replace(append_buffers=beside), items

    def back(self, state: AppendState, count: int | mx.array) -> AppendState:
        """The state whose positions are so many tokens before; counts of caches stay."""
        at = [
            each + (tokens_on(n, -count) if isinstance(count, int) else -count * tokens_on(n, 1))
            for each, n in ((each, each.size) for each in state.at)
        ]
        return state._replace(at=at)

    def begun(self, own: Sequence[Any], at: dict[str, int], goes_on: bool = False) -> AppendState:
        groups = [[own[i] for i in numbers] for numbers in self.groups]
        beside = [append_buffer_of(some, self.length) for some in groups]
        pairs = zip(beside, groups, strict=True)
        state = self._state(own, beside, [positions_of(each, some[0]) for each, some in pairs])
        watch([*chain(*groups)])
        return state

    def behind(
        self, other: AppendForm, own: Sequence[Any], state: AppendState
    ) -> AppendState | None:
        """The state behind a step of as many sequences and another number of tokens.

        None where append buffers have no room, or the caches are of another kind.
        """
        room = min(each.left for each in state.append_buffers) >= self.length
        if not room or self.caches != other.caches:
            return None
        return self._state(own, state.append_buffers, state.at)

    def _state(
        self, own: Sequence[Any], beside: list[AppendBuffer], at: list[mx.array]
    ) -> AppendState:
        arrays = named(own) | self._semaphores()
        fixed, states = ([arrays[name] for name in some] for some in (self.fixed, self.states))
        return AppendState(beside, at, fixed, states)

    def _semaphores(self) -> dict[str, mx.array]:
        names = [name for name in self.fixed if name.startswith("semaphores.")]
        arrays = mx.split(mx.zeros(len(names) * self.semaphores, mx.int32), len(names) or 1)
        return dict(zip(names, arrays, strict=False))

    def tried(self, arrays: Mapping[str, mx.array]) -> mx.array:
        """The logits of a step that has these inputs, and its positions zero."""
        arrays = {**arrays, **self._semaphores()}
        buffers, new, fixed, states = (
            [arrays[name] for name in some]
            for some in (self.buffers, self.appended, self.fixed, self.states)
        )
        at = [mx.zeros(positions_for(self.program.batch), mx.int32) for _ in self.at]
        given = arrays["tokens"], fixed, [buffers], at, rows_side_by_side(new), states
        logits: mx.array = self.compiled(*given)[0]
        return logits

    def _hold(self, items: list[dict[str, Any]], beside: Sequence[AppendBuffer]) -> None:
        """Let caches hold append buffers, and the numbers of theirs among the buffers of these."""
        for numbers, each in zip(self.groups, beside, strict=True):
            for i, number in enumerate(numbers):
                items[number] |= {"keys": (each, 2 * i), "values": (each, 2 * i + 1)}

    def run(
        self, tokens: mx.array, own: Sequence[Any], state: AppendState
    ) -> tuple[mx.array, Progress]:
        given = [x for each in state.append_buffers for x in each.arrays]
        buffers = [each.buffers for each in state.append_buffers]
        arrays = tokens, state.fixed, buffers, state.at, given, state.states
        logits, at, new, states = self.compiled(*arrays)
        items: list[dict[str, Any]] = [{} for _ in own]
        beside, start, room, more = list[AppendBuffer](), 0, RECHECK_AFTER, self.length
        groups = zip(self.groups, self.counting, state.append_buffers, strict=True)
        for numbers, names, old in groups:
            some, c = new[start : start + len(old.arrays)], vars(own[numbers[0]])
            now = old._replace(arrays=some, held=old.held + more, left=old.left - more)
            start, room = start + len(some), min(room, now.left)
            beside.append(now)
            counts = {name: c[name] + more for name in names}
            if "max_size" in c and c["_idx"] == c["max_size"]:  # it begins anew
                counts["_idx"] = c.get("keep", 0) + 1
            for number in numbers:
                items[number] = {**counts}
        self._hold(items, beside)
        left = self.put_back(own, items, states)
        return logits, Progress(self, left, AppendState(beside, at, state.fixed, states), room)


def _why_not(call: StepCall, batch: int) -> str | None:
    """Why attention has no kernel, unless nobody wants one."""
    if requested() == "reference":
        return None
    heads = call.k_cache[0].shape[1]
    share = call.q.shape[2] // (heads * call.width)
    shape = batch, heads, _TYPICAL_ROWS, call.width
    return why_not(call.q.dtype, share, shape, call.v_width, call.packing, call.q.shape[1])


def _buffers(groups: Sequence[Sequence[int]], keys: Sequence[Any]) -> Iterator[str]:
    """The names of the buffers of caches that have append buffers."""
    for number in chain(*groups):
        parts = [".0", ".1", ".2"] if "bits" in dict(keys[number][2:]) else [""]
        yield from (f"cache.{number}.{name}{part}" for name in _NAMES for part in parts)
