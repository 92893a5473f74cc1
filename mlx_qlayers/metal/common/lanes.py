"""Launches of groups of lanes: threads that share a part of the work, such as a point or a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from ...runtime.kernel import Kernel
from ...runtime.launch import TemplateValue
from ...runtime.spec import Spec

# Threads along x before they go on along y.
_ROW = 2**30


def lanes_for(parts: int) -> int:
    """The lanes for so many parts: the power of two that covers them, at most a SIMD group."""
    return min(32, 1 << max(0, parts - 1).bit_length())


def bind_groups(
    kernel: Kernel,
    specs: Sequence[Spec],
    constants: Sequence[mx.array],
    values: Mapping[str, TemplateValue],
    output_shapes: Sequence[tuple[int, ...]],
    *,
    count: int,
    lanes: int,
    threads: int,
    init_value: float | None = None,
) -> Callable[..., list[mx.array]]:
    """Binds ``count`` groups of ``lanes`` threads: whole threadgroups, in rows.

    ``constants`` are the inputs behind ``specs``; ``values`` may hold other kernels' parameters.
    """
    given = {**values, "LANES": lanes}
    width = min(_ROW, -(-count * lanes // threads) * threads)
    launch = kernel.bind(
        [*specs, *map(Spec.of, constants)],
        template={name: given[name] for name, _ in kernel.program.template},
        grid=(width, -(-count * lanes // width), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=output_shapes,
        init_value=init_value,
    )
    return lambda *arrays: launch([*arrays, *constants])
