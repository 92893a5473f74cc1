"""NVIDIA GPUs, by architecture: a new one is a file of its limits and measurements."""

from __future__ import annotations

from .record import Device, limits

# Whose measurements hold on all others: an H200.
_MEASURED = "sm_90"


def device(architecture: str) -> Device:
    """The GPU that MLX calls so, as ``sm_90``; one that does not say has an H200's memory."""
    name, measured = architecture if architecture.startswith("sm_") else "", limits(_MEASURED)
    usual = {"cores": measured["cores"]} if name else {**measured, "warpgroup_products": False}
    return Device("cuda", name, (_MEASURED,), **{**limits("cuda"), **usual, **limits(name)})
