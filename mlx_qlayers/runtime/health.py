"""The debug mode in which kernels report what went wrong in them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, ParamSpec, TypeVar, cast

import mlx.core as mx

from .backend import BackendError, debug_mode
from .explain import note
from .transformed import has_values

P = ParamSpec("P")
T = TypeVar("T")

# The words of the buffer that metal/health.metal describes.
WORDS = 9


@dataclass(frozen=True)
class Health:
    """A kernel's report of one launch.

    Attributes:
        started: how many threads began.
        grid: the number of threads in x, y and z, as the kernel saw it.
        finished: how many threads came to their end.
        failed: how many times a check failed.
        code: the code of the first failed check, 0 if none failed.
        value: the value that this check was given.
        thread: the thread's position in the grid.
    """

    started: int
    grid: tuple[int, int, int]
    finished: int
    failed: int
    code: int
    value: float
    thread: tuple[int, int, int]

    @classmethod
    def of(cls, words: Sequence[int]) -> Health:
        """Read the buffer's words."""
        started, gx, gy, gz, finished, failed, code, bits, index = words
        value = struct.unpack("<f", struct.pack("<I", bits))[0]
        thread = (index % max(gx, 1), index // max(gx, 1) % max(gy, 1), index // max(gx * gy, 1))
        return cls(started, (gx, gy, gz), finished, failed, code, value, thread)


class HealthError(RuntimeError):
    """A kernel reported an error, or not all of its threads finished.

    Attributes:
        kernel: the kernel's name.
        health: what it reported.
    """

    def __init__(self, kernel: str, health: Health, message: str) -> None:
        super().__init__(f"kernel {kernel}: {message}")
        self.kernel, self.health = kernel, health


@contextmanager
def health_checks() -> Iterator[None]:
    """Check every launch in a ``with`` block, those of other threads too; slow, for debugging.

    Each kernel gets a health buffer and is evaluated at once, its outputs filled with zeros first.

    Raises:
        HealthError: in the block, at the launch that went wrong.
        BackendError: at a launch inside ``mx.compile`` or ``mx.vmap``, where nothing can be read.

    Example:
        >>> q = k = v = mx.ones((1, 4, 8, 32))
        >>> with use_backend("host"), health_checks():
        ...     y = attention(q, k, v, scale=32**-0.5)
    """
    with debug_mode("health"):
        yield


def checked(
    op: str, kernel: Callable[P, T], reference: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run a kernel under health checks, and the reference in its place where it reports an error.

    Args:
        op: the operation's name, under which :func:`explain` tells of the fallback and its cause.
        kernel: the function that launches the kernel.
        reference: the same function in plain MLX operators.
        args: what both are called with.

    Returns:
        The result of ``kernel``, or else of ``reference``.

    Raises:
        BackendError: inside ``mx.compile`` or ``mx.vmap``, where nothing can be read.

    Example:
        >>> from mlx_qlayers.ops.exp import exp
        >>> y = checked("exp", exp, mx.exp, mx.ones(16))
    """
    try:
        with health_checks():
            return kernel(*args, **kwargs)
    except HealthError as error:
        note(op, "reference", str(error))
        return reference(*args, **kwargs)


def check_report(
    kernel: str, errors: Sequence[str], grid: tuple[int, int, int], outputs: list[mx.array]
) -> list[mx.array]:
    """Take the health buffer off a launch's outputs, and raise the error that it reports."""
    *rest, buffer = outputs
    if not has_values([buffer]):
        raise BackendError(f"kernel {kernel}: health checks cannot run while MLX traces a function")
    health = Health.of(memoryview(cast(Any, buffer)).tolist())
    if health.failed:
        declared = 1 <= health.code <= len(errors)
        meaning = errors[health.code - 1] if declared else "no meaning declared"
        message = (
            f"error {health.code} ({meaning}), value {health.value:g}, at thread {health.thread} "
            f"of {health.grid}; {health.failed} checks failed"
        )
    elif health.finished != (threads := prod(grid)):
        message = f"{health.started} of {threads} threads started, {health.finished} finished"
    else:
        return rest
    raise HealthError(kernel, health, message)
