"""The devices that kernels run on: one record for each, which is asked what they can do."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx

from ..backend import backend
from . import apple, nvidia
from .record import Device

# By backend, from the architecture that MLX tells.
DEVICES: dict[str, Callable[[str], Device]] = {
    "metal": apple.device,
    "cuda": nvidia.device,
    # Kernels run there as Apple's compiler would have them, a thread after the other.
    "host": lambda _: Device("host", "cpu", others=("cpu",), gpu=False),
    # MLX's own operators, wherever they run.
    "reference": lambda _: Device(
        "reference", gpu=False, stock_needs_alignment=mx.cuda.is_available()
    ),
}


def device_of(name: str | None = None) -> Device:
    """The device of a backend, by default of the current one: this machine's, or a typical one."""
    return _found(DEVICES[name or backend()], mx.device_info)


@lru_cache(maxsize=64)
def _found(of: Callable[[str], Device], ask: Callable[..., dict[str, Any]]) -> Device:
    return of(str(ask(mx.gpu).get("architecture")))
