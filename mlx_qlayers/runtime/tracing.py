"""Records which backend ran which kernel, with which grid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx

from .backend import debug_mode, undone
from .launch import Launch


@dataclass(frozen=True)
class Record:
    """One launch."""

    kernel: str  # the kernel's name
    backend: str  # the name of the backend
    grid: tuple[int, int, int]  # the number of threads in x, y and z
    threadgroup: tuple[int, int, int]  # the threads of one threadgroup in x, y and z
    template: dict[str, bool | int | mx.Dtype]  # the template's values by name
    input_shapes: tuple[tuple[int, ...], ...]  # the shapes of the inputs
    output_shapes: tuple[tuple[int, ...], ...]  # the shapes of the outputs


_active: dict[object, list[Record]] = {}


@contextmanager
def trace() -> Iterator[list[Record]]:
    """Record every launch inside a ``with`` block, those of other threads too.

    Under ``mx.compile`` a launch is recorded once, while Python traces the function.

    Yields:
        A list of :class:`Record`, which grows with each launch.

    Example:
        >>> from mlx_qlayers.ops.exp import exp
        >>> with use_backend("host"), trace() as launches:
        ...     y = exp(mx.ones(1024))
        >>> [(launch.kernel, launch.backend, launch.grid) for launch in launches]
        [('exp_forward', 'host', (1024, 1, 1))]
    """
    block, records = object(), list[Record]()
    with undone(lambda: _active.pop(block, None)), debug_mode("trace"):
        _active[block] = records
        yield records


def record(backend: str, launch: Launch) -> None:
    """Add a launch to the traces that are open."""
    made = Record(
        kernel=launch.program.name,
        backend=backend,
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        template=dict(launch.template),
        input_shapes=tuple(x.shape for x in launch.inputs),
        output_shapes=tuple(launch.output_shapes),
    )
    for records in list(_active.values()):
        records.append(made)
