"""Memory that nothing refers to any more, and when Python looks for it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx


def return_memory() -> None:
    """Give the system back what MLX and the C library hold of it for later."""
    gc.collect()
    mx.clear_cache()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python's collector off while many objects are made that stay, in which it looks again
    and again for some that do not.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
