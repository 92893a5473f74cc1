"""Pretends that a machine has other backends than it has."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

import mlx_qlayers.runtime.backend as backend
from mlx_qlayers.measurements.thresholds import threshold
from mlx_qlayers.runtime.devices import DEVICES, device_of
from mlx_qlayers.runtime.proof import trial

ALL = ("metal", "cuda", "host")


def has_gpu(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Let MLX tell that its GPU is such a one, as ``applegpu_g16s`` or ``sm_90``."""
    monkeypatch.setattr(mx, "device_info", lambda *_: {"architecture": architecture})


def has_device(monkeypatch: pytest.MonkeyPatch, name: str, **other: Any) -> None:
    """Let the device of a backend have other properties than it has."""
    device = replace(device_of(name), **other)
    monkeypatch.setitem(DEVICES, name, lambda _: device)


@pytest.fixture
def machine(monkeypatch):
    """Pretend that exactly these backends can run; plans made meanwhile are not used again."""

    def pretend(*names: str) -> None:
        for name in ALL:
            why = None if name in names else f"no {name} here"
            monkeypatch.setitem(backend.missing, name, lambda why=why: why)
        backend.advance_epoch()

    with trial():  # launches that nobody proves, where they are counted and not made
        yield pretend
    backend.advance_epoch()


def measured_from_one(name: str, *key: Any, **options: Any) -> Any:
    """Thresholds by which kernels for Hopper GPUs are faster from the first score on."""
    return 0 if name == "attention_ahead_least" else threshold(name, *key, **options)
