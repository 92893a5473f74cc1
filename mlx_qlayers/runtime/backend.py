"""What decides how a call runs besides its arguments: backend, mode and debugging.

The backend and the mode live in one context variable, so that threads and async tasks do not
disturb each other. Debug modes (``trace``, ``health_checks``) are for the whole process: they watch
the launches of all threads.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import TracebackType
from typing import Any, TypeVar

import mlx.core as mx

BACKENDS = ("auto", "metal", "cuda", "host", "ops")
_ENVIRONMENT = "MLX_QLAYERS_BACKEND"


class BackendError(RuntimeError):
    """A backend that was asked for by name cannot run."""


class Mode(Enum):
    """What becomes of the graph that a call adds to."""

    EAGER = "a call from Python, which may be differentiated"
    COMPILED = "one operation that mx.compile traces, to be evaluated only"
    INFERENCE = "part of a larger graph that is evaluated only"
    TRANSFORMED = "inside somebody's mx.grad, mx.compile or mx.vmap"
    GRADIENT = "inside a vjp of this package"

    __hash__ = object.__hash__  # Enum's own is a Python function, and contexts key every call

    @property
    def differentiable(self) -> bool:
        """Whether the call needs the nodes that carry a gradient."""
        return self in (Mode.EAGER, Mode.TRANSFORMED)

    @property
    def single(self) -> bool:
        """Whether the call is all that Python asks for, so that its own cost counts."""
        return self in (Mode.EAGER, Mode.COMPILED)


@dataclass(frozen=True, eq=False, slots=True)
class Context:
    """The state of a thread or task; one object for each state, so that it keys by identity.

    Attributes:
        requested: the backend that ``use_backend`` asked for, or None.
        mode: what becomes of the graph.
    """

    requested: str | None = None
    mode: Mode = Mode.EAGER


@cache  # as many as there are backends times modes
def _interned(requested: str | None, mode: Mode) -> Context:
    return Context(requested, mode)


_INITIAL = _interned(None, Mode.EAGER)
current: ContextVar[Context] = ContextVar("mlx_qlayers", default=_INITIAL)


@contextmanager
def mode(value: Mode) -> Iterator[None]:
    """Run a ``with`` block in a mode, in this thread or task."""
    token = current.set(_interned(current.get().requested, value))
    try:
        yield
    finally:
        current.reset(token)


class _Epoch:
    """What plans and bound launches depend on in the whole process.

    Attributes:
        number: advanced when measured results change; plans of an older epoch are not used again.
        debug: which debug modes are on; plans made under others are not used meanwhile.
    """

    number = 0
    debug: frozenset[str] = frozenset()


epoch = _Epoch()
_lock = threading.Lock()
_debug_blocks: Counter[str] = Counter()
T = TypeVar("T")


def advance_epoch() -> None:
    """Have every plan made anew, since what the choice of a path rests on has changed."""
    with _lock:
        epoch.number += 1


@contextmanager
def debug_mode(name: str) -> Iterator[None]:
    """Have plans made for a debug mode used in a ``with`` block, by all threads."""

    def enter(by: int) -> None:
        with _lock:
            _debug_blocks[name] += by
            epoch.debug = frozenset(+_debug_blocks)

    enter(1)
    try:
        yield
    finally:
        enter(-1)


class Outdated(Exception):
    """A plan was made while another thread changed the epoch: it serves one call and is not kept.

    Attributes:
        plan: the plan.
    """

    def __init__(self, plan: Any) -> None:
        self.plan = plan


def up_to_date(plan: T, debug: frozenset[str], number: int) -> T:
    """A plan to be kept under a key that holds this state of the epoch.

    Raises:
        Outdated: the epoch is another by now, so that the plan may be made for that one.
    """
    if (epoch.debug, epoch.number) != (debug, number):
        raise Outdated(plan)
    return plan


def _metal_missing() -> str | None:
    return None if mx.metal.is_available() else "mx.metal.is_available() is false"


def _cuda_missing() -> str | None:
    return None if mx.cuda.is_available() else "mx.cuda.is_available() is false"


@cache
def _host_missing() -> str | None:
    from importlib.util import find_spec

    if find_spec("ziglang") is None:
        return "its compiler is not installed: pip install 'mlx-qlayers[host]'"
    return None


# Why each backend cannot run on this machine, or None where it can; auto takes the first that can.
missing: dict[str, Callable[[], str | None]] = {
    "metal": _metal_missing,
    "cuda": _cuda_missing,
    "host": _host_missing,
    "ops": lambda: None,
}


def _check(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {name!r}")
    if name != "auto" and (why := missing[name]()):
        raise BackendError(f"the {name} backend was asked for and cannot run: {why}")
    return name


@cache
def _from_environment() -> str:
    return _check(os.environ.get(_ENVIRONMENT) or "auto")


_default: str | None = None


@contextmanager
def default_backend(name: str) -> Iterator[None]:
    """Force the backend of all threads that :class:`use_backend` does not force, in a block."""
    global _default
    before, _default = _default, _check(name)
    advance_epoch()
    try:
        yield
    finally:
        _default = before
        advance_epoch()


def requested() -> str:
    """The backend asked for by ``use_backend`` or ``MLX_QLAYERS_BACKEND``, else ``"auto"``."""
    return current.get().requested or _default or _from_environment()


def backend() -> str:
    """The backend that kernels run on now.

    Returns:
        ``"metal"``, ``"cuda"``, ``"host"`` or ``"ops"``; where nothing was forced, what
        ``"auto"`` stands for on this machine.

    Raises:
        BackendError: the backend forced by ``MLX_QLAYERS_BACKEND`` cannot run here.

    Example:
        >>> with use_backend("ops"):
        ...     backend()
        'ops'
    """
    name = requested()
    if name != "auto":
        return name
    for each, why in missing.items():
        if why() is None:
            name = each
            break
    return name


class use_backend:
    """Force the backend of this package's operations, for good or for a ``with`` block.

    It holds in the thread or async task that says so. A new thread begins with what
    ``MLX_QLAYERS_BACKEND`` says, unless it runs in a copy of this context
    (:func:`contextvars.copy_context`).

    Args:
        name: ``"metal"``, ``"cuda"``, ``"host"``, ``"ops"``, or ``"auto"`` to choose again.

    Raises:
        ValueError: no backend has that name.
        BackendError: that backend cannot run on this machine. It never falls back silently.

    Example:
        >>> with use_backend("ops"):
        ...     backend()
        'ops'
    """

    def __init__(self, name: str) -> None:
        self._name, self._before = _check(name), current.get()
        self.__enter__()

    def __enter__(self) -> None:
        current.set(_interned(self._name, current.get().mode))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        current.set(self._before)
