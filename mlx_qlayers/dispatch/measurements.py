"""What launchers ask of the tuner: what was found for a call on this machine's GPU.

Nothing else of the tuner is imported unless there is something to find, and an answer is kept: the
second time it takes a fraction of a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar, cast

from ..runtime.explain import note
from .store import device_kind, device_name, entries, forget, on_change, stored

F = TypeVar("F", bound=Callable[..., Any])

# The family and the arguments of a question.
Question = tuple[str, tuple[Hashable, ...]]
_watching: list[dict[Question, None]] = []
_heuristics_alone = False


class Found(NamedTuple):
    """What was found for a problem.

    Attributes:
        path: ``"kernel"``; the path that was faster, such as ``"stock"``; or ``"modelled"`` where
            costs were computed, for the kernel alone.
        config: the kernel's fastest configuration.
    """

    path: str
    config: Any


@cache
def found(family: str, *arguments: Hashable) -> Found | None:
    """What tuning found on this machine, or None where nothing was tuned.

    Args:
        family: the name of a kernel family.
        arguments: those of its :meth:`Family.asked`.

    Example:
        >>> from mlx_qlayers.formats import Format
        >>> best = found("qmv", 1, 3584, 3584, mx.bfloat16, Format(64, 4))
        >>> best is None or isinstance(best.path, str)
        True
    """
    for questions in _watching:
        questions[family, arguments] = None
    device = device_name()
    if _heuristics_alone or not entries(device):
        return None
    from .families import FAMILIES

    asked = FAMILIES[family]
    key = asked.key(asked.asked(*arguments))
    best = stored(key, asked.configs, asked.kernels, device)
    if best is None:
        return None
    path, config = best
    note("tuning", path, f"{key}: {config}")
    return Found(path, config)


def tuned(family: str) -> Callable[[F], F]:
    """Let a heuristic give way to what was found, and keep its answers.

    Its first argument is the backend; the others are those of :meth:`Family.asked`. The heuristic
    itself stays reachable by ``inspect.unwrap``.
    """

    def decorate(heuristic: F) -> F:
        @cache
        @wraps(heuristic)
        def configure(device: str, *arguments: Hashable) -> Any:
            best = found(family, *arguments) if device == device_kind() else None
            return heuristic(device, *arguments) if best is None else best.config

        on_change(configure.cache_clear)
        return cast(F, configure)

    return decorate


def decided(best: Found | None, kernel: str, unless: str | None) -> tuple[str, str | None]:
    """The kernel, and why ``auto`` leaves it for the stock operator: by what was measured here.

    Args:
        best: from :func:`found`.
        kernel: the kernel's name in reasons.
        unless: why it should be left as far as is known without tuning, if it should.
    """
    if _watching:  # what is collected is what the kernels would be asked
        return kernel, None
    if best is None or best.path == "modelled":
        return kernel, unless
    if best.path == "kernel":
        return f"{kernel}, as tuned here", None
    return kernel, f"{best.path} was faster when tuned here"


def rounded(size: int) -> int:
    """The next power of two: sizes up to there share what was found for one of them."""
    return 1 << (size - 1).bit_length()


@contextmanager
def questions() -> Iterator[dict[Question, None]]:
    """Collect what launchers ask inside a ``with`` block, each question once."""
    asked: dict[Question, None] = {}
    forget()
    _watching.append(asked)
    try:
        yield asked
    finally:
        _watching[:] = [others for others in _watching if others is not asked]
        forget()


@contextmanager
def heuristics_alone() -> Iterator[None]:
    """Inside a ``with`` block nothing that was found counts."""
    global _heuristics_alone
    before, _heuristics_alone = _heuristics_alone, True
    forget()
    try:
        yield
    finally:
        _heuristics_alone = before
        forget()


on_change(found.cache_clear)
