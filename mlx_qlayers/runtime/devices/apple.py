"""Apple GPUs, by generation: a new one is an entry here."""

from __future__ import annotations

import re

from .record import Device

# From the M3 on registers are given out as threads need them, and bfloat is a type of its own.
# From the M5 on tensor operations have units of their own, on phones a generation later.
_DYNAMIC_REGISTERS, _UNITS, _UNITS_OF_PHONES = 15, 17, 18
# About a second of the GPU of an M1 with 7 cores, at half of its 2.3 TFLOPS.
_SECOND = 1.2e12


def device(architecture: str) -> Device:
    """The GPU that MLX calls so, as ``applegpu_g16s``; one that does not say counts as an M1."""
    found = re.match(r"applegpu_g(\d+)(p?)", architecture)
    generation, phone = (int(found[1]), found[2]) if found else (0, "")
    return Device(
        "metal",
        architecture,
        measured=False,
        needs_proof=True,
        most_operations=_SECOND,
        few_registers=generation < _DYNAMIC_REGISTERS,
        tensor_units=generation >= (_UNITS_OF_PHONES if phone else _UNITS),
    )
