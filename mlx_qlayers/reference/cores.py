"""Work spread over the cores of a CPU, where every stock operator runs on one."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import pairwise

import mlx.core as mx

# Multiply-adds below which handing a part to another core costs more than it saves.
_MIN_WORK_PER_PART = 1 << 18


def parts(count: int, work_each: int) -> list[slice]:
    """Split ``count`` pieces evenly over the cores, in parts that are worth a thread.

    ``work_each`` is the number of multiply-adds in a piece.
    """
    n = max(1, min(_cores(), count, count * work_each // _MIN_WORK_PER_PART))
    return [slice(a, b) for a, b in pairwise(count * i // n for i in range(n + 1))]


def on_core(core: int) -> AbstractContextManager[object]:
    """Operators run beside the caller's stream in here; core 0 is the caller's own."""
    stream = core_stream(core)
    return nullcontext() if stream is None else mx.stream(stream)


@cache
def core_stream(core: int) -> mx.ThreadLocalStream | None:
    """The stream of a core; None for the caller's own, core 0."""
    return mx.new_thread_local_stream(mx.cpu) if core else None


@cache
def _cores() -> int:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(count or 1, 8)
