"""The devices that kernels run on: one record for each, which is asked what they can do."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx

from ..backend import backend
from .record import Device, limits

# From the M3 on registers are given out as threads need them, and bfloat is a type of its own.
# From the M5 on tensor operations have units of their own, on phones a generation later.
_DYNAMIC_REGISTERS, _UNITS, _UNITS_OF_PHONES = 15, 17, 18
# The device whose measurements hold on all other NVIDIA GPUs: an H200.
_MEASURED = "sm_90"


def _apple(architecture: str) -> Device:
    """The GPU that MLX calls so, as ``applegpu_g16s``; one that does not say counts as an M1."""
    found = re.match(r"(applegpu_g(\d+))(p?)", architecture)
    family, number, phone = found.groups() if found else ("", 0, "")
    usual: dict[str, Any] = {
        "few_registers": int(number) < _DYNAMIC_REGISTERS,
        "stock_has_gated_delta": True,
        "tensor_units": int(number) >= (_UNITS_OF_PHONES if phone else _UNITS),
    }
    # An M4 Pro and an M4 Max have one architecture and half and all of the cores and bandwidth.
    usual["named_by"] = ("device_name", "architecture")
    others = *[family] * bool(family), "metal"
    return Device("metal", architecture, others, **{**limits("metal"), **usual, **limits(family)})


def _nvidia(architecture: str) -> Device:
    """The GPU that MLX calls so, as ``sm_90``; one that does not say has an H200's memory."""
    name, measured = architecture if architecture.startswith("sm_") else "", limits(_MEASURED)
    usual = {"cores": measured["cores"]} if name else {**measured, "warpgroup_products": False}
    return Device("cuda", name, (_MEASURED,), **{**limits("cuda"), **usual, **limits(name)})


# By backend, from the architecture that MLX tells.
DEVICES: dict[str, Callable[[str], Device]] = {
    "metal": _apple,
    "cuda": _nvidia,
    # Kernels run there as Apple's compiler would have them, a thread after the other.
    "host": lambda _: Device(
        "host", "cpu", ("cpu",), gpu=False, launches_at_once=True, integer_rows=True
    ),
    # MLX's own operators, wherever they run.
    "reference": lambda _: Device(
        "reference", kernels=False, gpu=False, stock_needs_alignment=mx.cuda.is_available()
    ),
}


# The backends that run kernels.
KERNELS = tuple(name for name in DEVICES if name != "reference")


def device_of(name: str | None = None) -> Device:
    """The device of a backend, by default of the current one: this machine's, or a typical one."""
    return _found(DEVICES[name or backend()], mx.device_info)


def on_cpu() -> bool:
    """Whether MLX's own operators run on a CPU, which computes in float32."""
    return not device_of().gpu and mx.default_device().type == mx.cpu


@lru_cache(maxsize=64)
def _found(of: Callable[[str], Device], ask: Callable[..., dict[str, Any]]) -> Device:
    return of(str(ask(mx.gpu).get("architecture")))
