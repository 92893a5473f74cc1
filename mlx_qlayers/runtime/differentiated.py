"""What ``mx.grad`` meets at a launch that runs at once, as on ``host``.

The arrays that such a launch gives are constants to MLX, so a gradient through them would be zero,
without a word. Where somebody differentiates they therefore come out of a node that raises, as the
node of a launch on a GPU does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import mlx.core as mx


class _State(threading.local):
    """What the functions below tell each other, in each thread."""

    probed = False
    launch: Callable[[], list[mx.array]] | None = None


_state = _State()


def at_once(launch: Callable[[], list[mx.array]], inputs: Sequence[mx.array]) -> list[mx.array]:
    """What a launch gives: as it is, or under differentiation as a node that has no derivative.

    Inside an ``mx.custom_function`` nobody asks the node for one.
    """
    if not inputs or not _are_differentiated(inputs):
        return launch()
    _state.launch = launch
    return cast(list[mx.array], _node(*inputs))


def _are_differentiated(arrays: Sequence[mx.array]) -> bool:
    """Whether ``mx.grad``, ``mx.vjp`` or ``mx.jvp`` follows what becomes of some of the arrays.

    A compiled function runs its Python for such arrays each time, and for others when it meets
    their ranks and dtypes first in this thread: hence twice. One call takes a microsecond or two.
    In a vjp, and while ``mx.disable_compile`` holds, it runs for all: they count as differentiated.
    """
    return _probes(*arrays) and _probes(*arrays)


def _probes(*arrays: mx.array) -> bool:
    _state.probed = False
    _probe(*arrays)
    return _state.probed


def _seen(*arrays: mx.array) -> mx.array:
    _state.probed = True
    return arrays[0]


def _pending(*_: mx.array) -> list[mx.array]:
    launch, _state.launch = _state.launch, None
    assert launch is not None
    return launch()


def _no_derivative(*_: Any) -> NoReturn:
    raise ValueError(
        "a kernel's launch has no derivative of its own: wrap it in mx.custom_function. For second "
        "derivatives and mx.jvp of this package's operations take the reference path, "
        'use_backend("ops")'
    )


_probe = mx.compile(_seen, shapeless=True)
_node: Any = mx.custom_function(_pending)
_node.vjp(_no_derivative)
_node.jvp(_no_derivative)
