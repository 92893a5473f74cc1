"""Which backend runs a kernel: the choice, how to force it, and the reasons for it afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .tracing import record

if TYPE_CHECKING:
    from .launch import Launch

BACKENDS = ("auto", "metal", "cuda", "host", "ops")
_ENVIRONMENT = "MLX_QLAYERS_BACKEND"


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


# Why each backend cannot run on this machine, or None where it can.
_missing: dict[str, Callable[[], str | None]] = {
    "metal": _metal_missing,
    "cuda": _cuda_missing,
    "host": _host_missing,
    "ops": lambda: None,
}
_forced: str | None = None
_decisions: dict[tuple[str, str, str], int] = {}


def _check(name: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {name!r}")
    if name != "auto" and (why := _missing[name]()):
        raise BackendError(f"the {name} backend was asked for and cannot run: {why}")
    return name


def requested() -> str:
    """The backend asked for by ``use_backend`` or ``MLX_QLAYERS_BACKEND``, else ``"auto"``."""
    return _forced or _check(os.environ.get(_ENVIRONMENT) or "auto")


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
    return next(n for n in ("metal", "cuda", "host", "ops") if _missing[n]() is None)


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
        global _forced
        self._before = _forced
        _forced = _check(name)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        global _forced
        _forced = self._before


def choose(op: str, kernels: Iterable[str] = (), *, unless: str | None = None) -> str:
    """The backend on which ``op`` runs this time; the reason is kept for :func:`explain`.

    Args:
        op: the operation's public name.
        kernels: the backends that have a kernel for these arguments.
        unless: why ``auto`` should leave the kernel for the reference path, if it should.

    Raises:
        BackendError: a backend was forced that has no kernel for these arguments.
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
    elif (found := backend()) in available:
        name, reason = found, "auto"
    else:
        name, reason = "ops", f"no {found} kernel for these arguments"
    note(op, name, reason)
    return name


def run(launch: Launch) -> list[mx.array]:
    """Run one checked launch on the current backend.

    Raises:
        BackendError: that is ``ops``, which runs no kernels.
    """
    name = backend()
    if name == "ops":
        raise BackendError(
            f"kernel {launch.program.name} was called, but the ops backend runs none"
        )
    outputs = _module(name).launch(launch)
    note(f"kernel {launch.program.name}", name, "launched")
    record(name, launch)
    return outputs


@cache
def _module(name: str) -> Any:
    return import_module(f".{name}", __package__)


def note(op: str, path: str, reason: str) -> None:
    """Remember that ``op`` took ``path`` and why."""
    key = (op, path, reason)
    _decisions[key] = _decisions.get(key, 0) + 1


def explain(*, reset: bool = False) -> list[Decision]:
    """Which path each operation took since the start, why, and how many times.

    Args:
        reset: forget the decisions after returning them.

    Returns:
        One :class:`Decision` for each operation, path and reason, in the order first seen.

    Example:
        >>> for decision in explain():
        ...     print(decision)
    """
    found = [Decision(*key, calls=n) for key, n in _decisions.items()]
    if reset:
        _decisions.clear()
    return found
