"""Apple GPUs, by generation: what a new one has beyond the last is a file of its limits."""

from __future__ import annotations

import re

from .record import Device, limits

# From the M3 on registers are given out as threads need them, and bfloat is a type of its own.
# From the M5 on tensor operations have units of their own, on phones a generation later.
_DYNAMIC_REGISTERS, _UNITS, _UNITS_OF_PHONES = 15, 17, 18


def device(architecture: str) -> Device:
    """The GPU that MLX calls so, as ``applegpu_g16s``; one that does not say counts as an M1."""
    found = re.match(r"(applegpu_g(\d+))(p?)", architecture)
    family, number, phone = found.groups() if found else ("", 0, "")
    usual = {
        "few_registers": int(number) < _DYNAMIC_REGISTERS,
        "tensor_units": int(number) >= (_UNITS_OF_PHONES if phone else _UNITS),
    }
    others = *[family] * bool(family), "metal"
    return Device("metal", architecture, others, **{**limits("metal"), **usual, **limits(family)})
