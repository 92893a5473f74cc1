"""The state that decides how a call runs besides its arguments: backend, mode and debugging.

The backend and the mode live in one context variable, so that threads and async tasks do not
disturb each other. Debug modes (``trace``, ``health_checks``) are for the whole process: they watch
the launches of all threads.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

BACKENDS = ("auto", "metal", "cuda", "host", "reference")
_ENVIRONMENT = "MLX_QLAYERS_BACKEND"


class BackendError(RuntimeError):
    """A backend that was asked for by name cannot run."""


class ToolchainError(BackendError):
    """A backend's compiler, or its place for compiled kernels, fails whatever the kernel."""


class Mode(Enum):
    """The use of the graph that a call adds to."""

    EAGER = "a call from Python, which may be differentiated"
    COMPILED = "one operation that mx.compile traces, to be evaluated only"
    INFERENCE = "part of a larger graph that is evaluated only"
    TRANSFORMED = "inside somebody's mx.grad or mx.compile"
    MAPPED = "inside somebody's mx.vmap"
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


class Context(NamedTuple):
    """The state of a thread or task: the requested backend, and what becomes of the graph.

    ``invariant`` says that no choice may depend on how many rows or sequences a call has;
    ``integers`` that products on a CPU may round their rows to 8 bits; ``sparing`` that memory
    counts more than time.
    """

    requested: str | None = None
    mode: Mode = Mode.EAGER
    invariant: bool = False
    integers: bool = False
    sparing: bool = False


@contextmanager
def within(variable: ContextVar[Any], value: T) -> Iterator[T]:
    """Let a variable have another value in a ``with`` block, for this thread or task."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


_INITIAL = Context()
current: ContextVar[Context] = ContextVar("mlx_qlayers", default=_INITIAL)


def _changed(requested: str | None, mode: Mode | None) -> Generator[None]:
    """Change the context, and at the second step change it back.

    If an interrupt prevents that step, it is made when nothing refers to the generator any more.
    """
    before, late = current.get(), False
    own = before._replace(requested=requested or before.requested, mode=mode or before.mode)
    try:
        current.set(own)
        yield
    except GeneratorExit:
        late = True
    finally:
        if not late or current.get() is own:
            current.set(before)


class _Block:
    """A ``with`` block in which a thread or task has another context."""

    __slots__ = ("_change", "_changed")

    def __init__(self, requested: str | None = None, mode: Mode | None = None) -> None:
        self._change = requested, mode

    def __enter__(self) -> None:
        self._changed = _changed(*self._change)
        next(self._changed)

    def __exit__(self, *error: object) -> None:
        next(self._changed, None)


def mode(value: Mode) -> _Block:
    """Run a ``with`` block in a mode, in this thread or task."""
    return _Block(mode=value)


class _Epoch:
    """The process-wide state that plans and bound launches depend on."""

    debug: frozenset[str] = frozenset()  # debug modes that are on; others' plans are not used then
    number = 0  # advanced when measured results change; older plans are not used again
    state: tuple[frozenset[str], int] = debug, number  # both, as a key

    def change(self, debug: Iterable[str], number: int) -> None:
        """Make another state that of the process, under the lock."""
        self.debug, self.number = self.state = frozenset(debug), number


epoch = _Epoch()
_lock = threading.Lock()
_debug_blocks: dict[object, str] = {}
T = TypeVar("T")


def advance_epoch() -> None:
    """Have every plan made anew, since what the choice of a path rests on has changed."""
    with _lock:
        epoch.change(epoch.debug, epoch.number + 1)


@contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """Undo at the end of a ``with`` block what may be undone twice, despite an interrupt."""
    try:
        try:
            yield
        finally:
            undo()
    finally:
        undo()


@contextmanager
def debug_mode(name: str) -> Iterator[None]:
    """Have plans made for a debug mode used in a ``with`` block, by all threads."""
    block = object()

    def end() -> None:
        with _lock:
            _debug_blocks.pop(block, None)
            epoch.change(_debug_blocks.values(), epoch.number)

    with undone(end):
        with _lock:
            _debug_blocks[block] = name
            epoch.change(_debug_blocks.values(), epoch.number)
        yield


class Outdated(Exception):
    """A plan from before another thread changed the epoch: it serves one call only."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan


def up_to_date(plan: T, state: Hashable) -> T:
    """A plan to be kept under a key with this state of the epoch, or :class:`Outdated`."""
    if epoch.state != state:
        raise Outdated(plan)
    return plan


@cache
def _host_missing() -> str | None:
    from importlib.util import find_spec

    if find_spec("ziglang") is None:
        return "its compiler is not installed: pip install 'mlx-qlayers[host]'"
    return None


# Why each backend cannot run on this machine, or None where it can; auto takes the first that can.
missing: dict[str, Callable[[], str | None]] = {
    "metal": lambda: None if mx.metal.is_available() else "mx.metal.is_available() is false",
    "cuda": lambda: None if mx.cuda.is_available() else "mx.cuda.is_available() is false",
    "host": _host_missing,
    "reference": lambda: None,
}


# Why a backend that is there failed; ``auto`` passes over it from then on.
_failures: dict[str, str] = {}


def unavailable(name: str) -> str | None:
    """Why ``auto`` cannot take a backend, or None where it can."""
    return missing[name]() or _failures.get(name)


def falls_back(error: ToolchainError) -> bool:
    """Whether the choice was left to ``auto``, which goes on without ``host``; said once."""
    if requested() != "auto":
        return False
    with _lock:
        if "host" not in _failures:
            _failures["host"] = str(error)
            epoch.change(epoch.debug, epoch.number + 1)
            print(f"mlx-qlayers: no kernels run on this CPU, {error}", file=sys.stderr)
    return True


def _check(name: str) -> str:
    name = "reference" if name == "ops" else name  # as it was called before
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
        ``"metal"``, ``"cuda"``, ``"host"`` or ``"reference"``; where nothing was forced, what
        ``"auto"`` stands for on this machine.

    Raises:
        BackendError: the backend forced by ``MLX_QLAYERS_BACKEND`` cannot run here.

    Example:
        >>> with use_backend("reference"):
        ...     backend()
        'reference'
    """
    if (name := requested()) != "auto":
        return name
    return next(each for each in missing if unavailable(each) is None)


class use_backend(_Block):
    """Force the backend of this package's operations in a ``with`` block.

    It holds in the thread or async task that enters the block. A new thread begins with the
    backend of ``MLX_QLAYERS_BACKEND``, unless it runs in a copy of this context
    (:func:`contextvars.copy_context`). :func:`set_backend` forces one without a block.

    Args:
        name: ``"metal"``, ``"cuda"``, ``"host"``, ``"reference"``, or ``"auto"`` to choose again.

    Raises:
        ValueError: no backend has that name.
        BackendError: that backend cannot run on this machine. It never falls back silently.

    Example:
        >>> with use_backend("reference"):
        ...     backend()
        'reference'
    """

    __slots__ = ()

    def __init__(self, name: str) -> None:
        super().__init__(_check(name))


def set_backend(name: str) -> None:
    """Force the backend of this package's operations from now on, in this thread or async task.

    Args:
        name: ``"metal"``, ``"cuda"``, ``"host"``, ``"reference"``, or ``"auto"`` to choose again.

    Raises:
        ValueError: no backend has that name.
        BackendError: that backend cannot run on this machine. It never falls back silently.

    Example:
        >>> set_backend("reference")
        >>> backend()
        'reference'
        >>> set_backend("auto")
    """
    current.set(current.get()._replace(requested=_check(name)))
