"""To be deleted: the choice of a path as operations made it that are not dispatched yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from .backend import BackendError, backend, missing, requested
from .explain import note
from .kernel import Kernel
from .transformed import has_values

Note = tuple[str, str, str]


def on_request(forget: Callable[[], None]) -> None:
    return None


def being_traced(arrays: Sequence[mx.array]) -> bool:
    try:
        mx.async_eval(*arrays)
    except ValueError:
        return not has_values(arrays)
    return False


def choose(op: str, kernels: Iterable[str] = (), **options: Any) -> str:
    decision = decide(op, kernels, **options)
    note(*decision)
    return decision[1]


def decide(
    op: str,
    kernels: Iterable[str] = (),
    *,
    unless: str | None = None,
    host_gain: float | None = None,
    arrays: Sequence[mx.array] = (),
    by: str = "",
) -> Note:
    wanted, available = requested(), tuple(kernels)
    if wanted == "ops":
        name, reason = "ops", "asked for"
    elif wanted != "auto":
        if wanted not in available:
            raise BackendError(f"{op} has no {wanted} kernel for these arguments")
        name, reason = wanted, "asked for"
    elif unless is not None:
        name, reason = "ops", unless
    elif (found := backend()) not in available:
        name, reason = "ops", f"no {found} kernel for these arguments"
        if found == "ops" and "host" in available and (why := missing["host"]()):
            reason = f"no GPU, and no host backend: {why}"
    elif found == "host":
        name, reason = "ops", "the kernel was not measured on a CPU"
        if host_gain is not None and host_gain <= 1:
            reason = f"on a CPU the kernel has {host_gain:.2g} times the speed of MLX's operators"
        elif host_gain is not None:
            if being_traced(arrays):
                reason = "mx.compile or mx.vmap is tracing the inputs, and the host backend needs"
            else:
                name, reason = "host", f"auto: {host_gain:.2g} times the speed of MLX's operators"
                reason += " on a CPU"
    else:
        name, reason = found, "auto"
    return op, name, f"{reason}, by {by}" if by and name != "ops" else reason


def count(key: Note) -> None:
    note(*key)


def note_again(notes: Iterable[Note]) -> None:
    for each in notes:
        note(*each)


@contextmanager
def noting() -> Iterator[list[Note]]:
    yield []


class PreparedLaunch:
    def __init__(
        self,
        kernel: Kernel,
        template: Mapping[str, Any],
        grid: Any,
        threadgroup: Any,
        output_shapes: Any,
        init_value: float | None = None,
    ) -> None:
        self._kernel = kernel
        self._call: dict[str, Any] = {
            "template": template,
            "grid": grid,
            "threadgroup": threadgroup,
            "output_shapes": output_shapes,
            "init_value": init_value,
        }

    def __call__(self, arrays: list[mx.array]) -> list[mx.array]:
        return self._kernel(arrays, **self._call)
