"""Launches what follows the products of a gated unit with many rows."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ...runtime.kernel import Kernel
from ...runtime.spec import Spec
from .qmv import GATES, Gate

# Neighbours of a thread.
RUN = 8

_FILE, _TEMPLATE = "quantized_matmul/gated.metal", ("T", "gate")
_ROWS = Kernel(
    "gated_rows", _FILE, ("x", "shape"), ("y",), _TEMPLATE, registers=3 * RUN, large=True
)
_INTO = Kernel(
    "gated_into",
    _FILE,
    ("x", "shape", "room"),
    ("done",),
    _TEMPLATE,
    registers=3 * RUN,
    large=True,
)


def gated_rows(x: Spec, gate: Gate, columns: int | None = None) -> Callable[[mx.array], mx.array]:
    """The launch that computes ``activation(first) * second``.

    MLX compiles a kernel for that, on CUDA for seconds, which takes twice the time of this one.

    Args:
        x: (M, 2 N), both side by side, N a multiple of :data:`RUN`.
        gate: the activation.

    Returns:
        A function of ``x`` that gives (M, N).
    """
    columns = x.shape[1] // 2
    return _bound(_ROWS, x, gate, columns, 0, [], (x.shape[0], columns))


def gated_into(x: Spec, gate: Gate, columns: int, first: int) -> Callable[..., mx.array]:
    """The same as columns of an array that is there.

    Args:
        x: (M, 2 N), N and the following a multiple of :data:`RUN`.
        gate: the activation.
        columns: those of that array.
        first: where those of ``x`` begin in it.

    Returns:
        A function of ``x`` and the array (M, columns), that gives one which is there when it was
        written.
    """
    room = Spec((x.shape[0], columns), x.dtype)
    return _bound(_INTO, x, gate, columns, first, [room], (RUN,))


def _bound(
    kernel: Kernel,
    x: Spec,
    gate: Gate,
    columns: int,
    first: int,
    room: list[Spec],
    result: tuple[int, ...],
) -> Callable[..., mx.array]:
    runs = x.shape[1] // 2 // RUN
    count = x.shape[0] * runs
    shape = mx.array([runs, count, columns // RUN, first // RUN], mx.int32)
    launch = kernel.bind(
        [x, Spec.of(shape), *room],
        template={"T": x.dtype, "gate": GATES.index(gate)},
        grid=(count, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[result],
    )
    return lambda x, *room: launch([x, shape, *room])[0]
