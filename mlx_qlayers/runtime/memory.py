"""Memory that nothing refers to any more."""

from __future__ import annotations

import ctypes
import gc

import mlx.core as mx


def return_memory() -> None:
    """Give the system back what MLX and the C library hold of it for later."""
    gc.collect()
    mx.clear_cache()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)
