"""Waits for a result, but not for ever."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import Context, copy_context
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import mlx.core as mx

from .tracing import trace

T = TypeVar("T")


class KernelTimeout(TimeoutError):
    """A result was not there in time; the message names the kernels that were launched for it."""


def wait_for(result: T | Callable[..., T], seconds: float, *inputs: Any) -> T:
    """Evaluate arrays, and raise in the calling thread when that takes too long.

    It may be called from any thread, from many at once too.

    It stops the waiting. It cannot stop the kernel: nothing in MLX can. On Metal the system
    ends a command buffer that runs for seconds, and MLX then fails; on an NVIDIA GPU a kernel that
    hangs goes on until the process ends; the checked build of the host backend ends one by its
    budget, the fast build does not. After a timeout the stream of the hanging work stays
    blocked, and the process is best ended with ``os._exit``, since its normal end waits for MLX.

    Args:
        result: arrays in any nesting of lists, tuples and dicts, or a function that returns them.
            Only a function bounds the work that happens before evaluation, such as a launch on
            ``host``, which runs at once. It is called in another thread, where MLX cannot evaluate
            what this one has left unevaluated: pass such arrays as ``inputs``.
        seconds: how long to wait.
        inputs: what the function is called with; arrays among them are evaluated first.

    Returns:
        The arrays, evaluated.

    Raises:
        KernelTimeout: they were not there in time.

    Example:
        >>> from mlx_qlayers.ops.exp import exp
        >>> y = wait_for(exp, 5, mx.ones(16))
    """
    # A stream works only in its own thread: start the work here, wait for it there.
    mx.async_eval(inputs if callable(result) else result)
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    done: Future[T] = Future()
    with trace() as launches:
        worker.tasks.put((copy_context(), result, inputs, done))
        wait([done], seconds)
    if not done.done():
        names = ", ".join(dict.fromkeys(f"{r.kernel} on {r.backend}" for r in launches))
        raise KernelTimeout(
            f"no result within {seconds:g} s; kernels launched meanwhile: {names or 'none'}"
        )
    # Workers serve again, and keep their streams; one that hangs is left behind.
    _idle.append(worker)
    return done.result()


class _Worker(Thread):
    def __init__(self) -> None:
        super().__init__(name="mlx-qlayers-wait", daemon=True)
        self.tasks: SimpleQueue[tuple[Context, Any, tuple[Any, ...], Future[Any]]] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            self._serve(*self.tasks.get())

    @staticmethod
    def _serve(context: Context, result: Any, inputs: tuple[Any, ...], done: Future[Any]) -> None:
        """One task; a frame of its own, so that a waiting worker keeps no arrays alive."""
        try:
            mx.eval(inputs)
            found = context.run(result, *inputs) if callable(result) else result
            mx.eval(found)
            done.set_result(found)
        except BaseException as error:
            done.set_exception(error)


_idle: list[_Worker] = []
