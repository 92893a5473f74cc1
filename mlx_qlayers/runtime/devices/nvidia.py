"""NVIDIA GPUs, by architecture: a new one is an entry here."""

from __future__ import annotations

from .record import Device

# What all layouts of this package declare at most.
DECLARED_MEMORY = 48 * 1024
# Multiprocessors of an H200, where products were measured: MLX tells nobody's.
_CORES = 132
# KiB of shared memory that a threadgroup may ask for, where that is not as on GeForce.
# Source: CUDA C++ Programming Guide, technical specifications per compute capability.
_SHARED = {"sm_80": 163, "sm_87": 163, "sm_90": 227, "sm_100": 227, "sm_103": 227}


def device(architecture: str) -> Device:
    """The GPU that MLX calls so, as ``sm_90``."""
    name = architecture if architecture.startswith("sm_") else ""
    return Device(
        "cuda",
        name,
        cores=_CORES,
        threadgroup_memory=DECLARED_MEMORY,
        dynamic_memory=_SHARED.get(name or "sm_90", 99) * 1024,  # where there is none, of an H200
        spills=True,
        tensor_cores=True,
        warpgroup_products=name == "sm_90",
        stock_is_tf32=True,
        stock_is_cudnn=True,
        stock_needs_alignment=True,
        stock_compiles=True,
        orders_threadgroups=True,
        launches_views=True,
    )
