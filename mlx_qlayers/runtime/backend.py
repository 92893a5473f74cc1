"""Which backend runs a kernel: the choice, how to force it, and the reasons for it afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .differentiated import at_once
from .tracing import record

if TYPE_CHECKING:
    from .launch import Launch

BACKENDS = ("auto", "metal", "cuda", "host", "ops")
_ENVIRONMENT = "MLX_QLAYERS_BACKEND"
_TRACED = "mx.compile or mx.vmap is tracing the inputs"


class BackendError(RuntimeError):
    """A backend that was asked for by name cannot run."""


@dataclass(frozen=True)
class Decision:
    """One path that an operation took, why, and how often."""

    op: str
    path: str
    reason: str
    calls: int = 1

    def __str__(self) -> str:
        return f"{self.op}: {self.path} ({self.reason}), {self.calls} calls"


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
_missing: dict[str, Callable[[], str | None]] = {
    "metal": _metal_missing,
    "cuda": _cuda_missing,
    "host": _host_missing,
    "ops": lambda: None,
}
_forced: str | None = None
# What is to be forgotten when that changes.
_forgetful: list[Callable[[], None]] = []
# An operation, the path that it took, and why.
Note = tuple[str, str, str]
_decisions: dict[Note, int] = {}
# What :func:`noting` collects, by the threads that are inside it.
_collected: dict[int, list[Note]] = {}


def _check(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {name!r}")
    if name != "auto" and (why := _missing[name]()):
        raise BackendError(f"the {name} backend was asked for and cannot run: {why}")
    return name


def requested() -> str:
    """The backend asked for by ``use_backend`` or ``MLX_QLAYERS_BACKEND``, else ``"auto"``."""
    return _forced or _from_environment()


def on_request(forget: Callable[[], None]) -> None:
    """Have something forgotten whenever :func:`requested` may change: to ask takes longer."""
    _forgetful.append(forget)


def _force(name: str | None) -> None:
    global _forced
    _forced = name
    for forget in _forgetful:
        forget()


@cache
def _from_environment() -> str:
    # Read once: to look it up takes longer than all the rest of a choice.
    return _check(os.environ.get(_ENVIRONMENT) or "auto")


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
    if name == "auto":
        for each, why in _missing.items():
            if why() is None:
                name = each
                break
    return name


class use_backend:
    """Force the backend of every operation of this package, for good or for a ``with`` block.

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
        self._before = _forced
        _force(_check(name))

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        _force(self._before)


def choose(
    op: str,
    kernels: Iterable[str] = (),
    *,
    unless: str | None = None,
    host_gain: float | None = None,
    arrays: Sequence[mx.array] = (),
    by: str = "",
) -> str:
    """The backend on which ``op`` runs this time; the reason is kept for :func:`explain`.

    Args:
        op: the operation's public name.
        kernels: the backends that have a kernel for these arguments.
        unless: why ``auto`` should leave the kernel for the reference path, if it should.
        host_gain: how many times as fast as the reference the kernel was measured to be on a CPU.
            ``auto`` runs it there only where this is more than 1.
        arrays: what the kernel will read. On ``host`` they are evaluated now; where ``mx.compile``
            or ``mx.vmap`` is tracing they have no values, and ``auto`` takes the reference path.
        by: which of the operation's kernels runs, for the reason.

    Raises:
        BackendError: a backend was forced that has no kernel for these arguments.
    """
    decision = decide(op, kernels, unless=unless, host_gain=host_gain, arrays=arrays, by=by)
    count(decision)
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
    """What :func:`choose` would note and go by: the operation, the backend and the reason.

    It is the same for as long as the arguments and :func:`requested` are, but on ``host``, where
    the arrays may be traced or not.
    """
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
        name, reason = "ops", _no_kernel(found, available)
    elif found == "host":
        name, reason = _auto_on_host(host_gain, arrays)
    else:
        name, reason = found, "auto"
    return op, name, f"{reason}, by {by}" if by and name != "ops" else reason


def _no_kernel(found: str, available: Sequence[str]) -> str:
    if found == "ops" and "host" in available and (why := _missing["host"]()):
        return f"no GPU, and no host backend: {why}"
    return f"no {found} kernel for these arguments"


def _auto_on_host(gain: float | None, arrays: Sequence[mx.array]) -> tuple[str, str]:
    if gain is None:
        return "ops", "the kernel was not measured on a CPU"
    if gain <= 1:
        return "ops", f"on a CPU the kernel has {_times(gain)} the speed of MLX's operators"
    if being_traced(arrays):
        return "ops", f"{_TRACED}, and the host backend runs at once"
    return "host", f"auto: {_times(gain)} the speed of MLX's operators on a CPU"


@cache
def _times(gain: float) -> str:
    return f"{gain:.2g} times"


def being_traced(arrays: Sequence[mx.array]) -> bool:
    """Whether arrays have no values, because ``mx.compile`` or ``mx.vmap`` is tracing.

    Where they can have values they will: this has them computed, and does not wait for it.
    """
    try:
        mx.async_eval(*arrays)
    except ValueError:  # also where a gradient is taken, though they have values there
        return not _evaluated(arrays)
    return False


def _evaluated(arrays: Sequence[mx.array]) -> bool:
    """Wait for the values of arrays, if they can have any."""
    try:
        mx.eval(*arrays)
    except ValueError as error:
        if "transformations" not in str(error):
            raise
        return False
    return True


def run(launch: Launch) -> list[mx.array]:
    """Run one checked launch on the current backend.

    Raises:
        BackendError: that is ``ops``, which runs no kernels; or it is ``host`` and the inputs have
            no values, because ``mx.compile`` or ``mx.vmap`` is tracing.
    """
    name, kernel = backend(), launch.program.name
    if name == "ops":
        raise BackendError(f"kernel {kernel} was called, but the ops backend runs none")
    if name == "host" and not _evaluated(launch.inputs):
        raise BackendError(
            f"kernel {kernel}: {_TRACED}, and the host backend runs at once. Leave the call out of "
            'the traced function, or use_backend("ops")'
        )
    if name == "host":
        outputs = at_once(partial(_module(name).launch, launch), launch.inputs)
    else:
        outputs = _module(name).launch(launch)
    note(f"kernel {kernel}", name, "launched")
    record(name, launch)
    return outputs


@cache
def _module(name: str) -> Any:
    return import_module(f".{name}", __package__)


def note(op: str, path: str, reason: str) -> None:
    """Remember that ``op`` took ``path`` and why."""
    count((op, path, reason))


def count(key: Note) -> None:
    """:func:`note` for those who keep what they note again and again."""
    try:
        _decisions[key] += 1
    except KeyError:
        _decisions[key] = 1
    if _collected and (found := _collected.get(threading.get_ident())) is not None:
        found.append(key)


def note_again(notes: Iterable[Note]) -> None:
    """Count what :func:`noting` found as if it had happened once more."""
    for key in notes:
        _decisions[key] = _decisions.get(key, 0) + 1


@contextmanager
def noting() -> Iterator[list[Note]]:
    """Inside, in this thread, keep what is noted as well."""
    thread, found = threading.get_ident(), list[Note]()
    before = _collected.get(thread)
    _collected[thread] = found
    try:
        yield found
    finally:
        if before is None:
            del _collected[thread]
        else:
            _collected[thread] = before


def explain(*, reset: bool = False) -> list[Decision]:
    """Which path each operation took since the start, why, and how many times.

    Kernels that were launched are listed too, under the name ``kernel ...``.

    Args:
        reset: forget the decisions after returning them.

    Returns:
        One :class:`Decision` for each operation, path and reason, in the order first seen.

    Example:
        >>> with use_backend("ops"):
        ...     y = grid_sample(mx.ones((1, 4, 4, 3)), mx.zeros((1, 2, 2, 2)))
        >>> for decision in explain():
        ...     print(decision)
        grid_sample: ops (asked for), 1 calls
    """
    found = [Decision(*key, calls=n) for key, n in _decisions.items()]
    if reset:
        _decisions.clear()
    return found
