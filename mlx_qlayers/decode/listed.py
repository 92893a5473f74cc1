"""A step's calls with lists of launches in the place of those that the host backend can list."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

import mlx.core as mx

from ..runtime.host.bound_launch import checking
from ..runtime.host.launch_list import LaunchList, Unlisted, rms_norm
from ..runtime.launch import Launch
from .calls import BoundCalls, Called, called, made_by

_VIEWS = mx.reshape, mx.expand_dims, mx.squeeze, mx.flatten, mx.unflatten
_NORMED = mx.float32, mx.float16, mx.bfloat16


def as_listed(call: Called) -> Called:
    """The same call where it is not in a list, with the same bits."""
    return call._replace(function=rms_norm) if call.function is mx.fast.rms_norm else call


def claim(found: BoundCalls, registers: Sequence[Any], advancing: Set[int]) -> None:
    """Have MLX write where a step will put its rows: what anybody else holds it copies first."""
    for call in found.calls:
        if call.function is operator.setitem and call.given[1] in advancing:
            buffer, index = (registers[i] for i in call.given[:2])
            buffer[index] = 0


def run_listed(
    found: BoundCalls,
    registers: list[Any],
    start: Sequence[Any],
    outputs: Mapping[str, int],
    advancing: Set[int],
) -> None:
    """Run the calls of a step by lists, which the first such step makes.

    ``start`` has the arrays that are there in each step, ``outputs`` the registers that it gives,
    and ``advancing`` the indices of rows that nobody has seen.
    """
    if checking():
        return called(found.calls, registers)
    if not found.listed:
        called(found.calls, registers, frees=False)
        found.listed.append(_listed(found.calls, registers, start, outputs, advancing))
        return None
    steps, given = found.listed.pop(), registers.copy()
    try:
        for step in steps:
            if isinstance(step, LaunchList):
                step.run(registers)
            else:
                called((step,), registers)
    except Unlisted:  # rows that were written are written again
        registers[:] = given
        called(found.calls, registers)
    found.listed.append(steps)
    return None


def _listed(
    calls: Sequence[Called],
    arrays: Sequence[Any],
    start: Sequence[Any],
    outputs: Mapping[str, int],
    advancing: Set[int],
) -> list[Called | LaunchList]:
    """The calls, of which neighbours that can be listed are one list of launches."""
    fixed = {i for i, array in enumerate(start) if array is not None}
    steps: list[Called | LaunchList] = []
    pending: list[tuple[str, Called]] = []
    touched: set[int] = set()
    swapped: set[int] = set()
    users: dict[int, list[Called]] = {i: [] for i in outputs.values()}
    for call in calls:
        for i in call.given:
            users.setdefault(i, []).append(call)

    def kind_of(call: Called) -> str | None:
        """How a call is added: swapped axes are for copies and for those that swap them back."""
        kind, target = _kind(call, arrays, advancing), made_by(call.target)[0]
        if not (kind == "swap" or getattr(call.function, "swaps", False)):
            return kind
        if kind == "swap" and call.given[0] in swapped:
            return kind
        of = [_kind(each, arrays, advancing) for each in users.get(target, ())]
        made_here = kind == "launch" or call.given[0] in touched
        if not made_here or target in outputs.values() or not {*of} <= {"copy", "swap"}:
            return None
        swapped.add(target)
        return kind

    def flush() -> None:
        own = {id(call) for _, call in pending}
        others = {i for call in calls if id(call) not in own for i in call.given}
        steps.extend(_joined(pending, arrays, fixed, others | {*outputs.values()}, swapped))
        pending.clear()
        touched.clear()

    for call in calls:
        if (kind := kind_of(call)) is not None:
            pending.append((kind, call))
            touched.update(made_by(call.target), call.given[:1] if kind == "copy" else ())
        else:
            # A call that takes nothing of the list goes ahead of it.
            if call.function is operator.setitem or not touched.isdisjoint(call.given):
                flush()
            steps.append(call._replace(free=()))
    flush()
    return steps


def _kind(call: Called, arrays: Sequence[Any], advancing: Set[int]) -> str | None:
    """How a call is added to a list; None if it cannot be."""
    if isinstance(launch := getattr(call.function, "launch", None), Launch):
        return "launch" if launch.init_value is None and isinstance(call.target, slice) else None
    given = [arrays[i] for i in call.given]
    if call.function in _VIEWS:
        return "view"
    if call.function is mx.transpose:
        return "swap" if [*given[1:][0]] == [0, 2, 1, 3] else None
    if call.function is rms_norm:
        x, weight, _ = given
        normed = weight is not None and x.dtype == weight.dtype and x.dtype in _NORMED
        return "norm" if normed else None
    if call.function is operator.setitem and call.given[1] in advancing:
        buffer, index, rows = given
        part = buffer.shape[:2] + rows.shape[2:3] + buffer.shape[3:]
        whole = buffer.ndim == 4 and rows.shape == part
        plain = all(each.step == 1 for each in index)
        return "copy" if whole and plain and rows.dtype == buffer.dtype else None
    return None


def _joined(
    pending: Sequence[tuple[str, Called]],
    arrays: Sequence[Any],
    fixed: Set[int],
    exported: set[int],
    swapped: Set[int],
) -> list[Called | LaunchList]:
    here = {i for _, call in pending for i in (*made_by(call.target), *call.given)}
    outside = not exported.isdisjoint(here & swapped)
    for kind, call in reversed(pending):
        if kind in ("view", "swap") and call.target in exported:
            exported.add(call.given[0])
    if sum(kind == "launch" for kind, _ in pending) > 1 and not outside:
        copies = (arrays[c.given[2]].shape for kind, c in pending if kind == "copy")
        length = len(pending) + sum(batch * rows for batch, _, rows, _ in copies)
        try:
            found = LaunchList(length, arrays, fixed, exported)
            for kind, call in pending:
                _add(found, kind, call, arrays)
            found.close()
            return [found]
        except Unlisted:
            pass
    return [call._replace(free=()) for _, call in pending]


def _add(found: LaunchList, kind: str, call: Called, arrays: Sequence[Any]) -> None:
    x, *others = call.given
    if kind == "launch":
        first, *_ = made_by(call.target)
        swaps = getattr(call.function, "swaps", False)
        found.add_launch(call.function.launch, call.given, call.more or (), first, swaps)  # type: ignore[attr-defined]
    elif kind == "norm":
        assert isinstance(call.target, int)
        found.add_norm(x, others[0], arrays[others[1]], call.target)
    elif kind == "copy":
        found.add_copy(x, *others)
    elif isinstance(call.target, int):
        (found.add_swap if kind == "swap" else found.add_view)(x, call.target)
    for register in call.free:
        found.release(register)
