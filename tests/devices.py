"""The one way in which tests imitate devices: by the two tables that the package asks."""

from dataclasses import replace
from typing import Any

import pytest

from mlx_qlayers.runtime import backend
from mlx_qlayers.runtime.devices import DEVICES, device_of
from mlx_qlayers.runtime.devices.record import MAX_THREADGROUP_MEMORY

# The host backend has as much threadgroup memory as Metal.
MEMORY_OF_HOST = {"threadgroup_memory": MAX_THREADGROUP_MEMORY, "dynamic_memory": 0}


def has_device(patch: pytest.MonkeyPatch, name: str, /, **other: Any) -> None:
    """Let the device of a backend have other properties than it has."""
    device = replace(device_of(name), **other)
    patch.setitem(DEVICES, name, lambda _: device)


def can_run(patch: pytest.MonkeyPatch, name: str, why_not: str | None = None) -> None:
    """Let a backend run here, or let it be missing for a reason."""
    patch.setitem(backend.missing, name, lambda: why_not)
