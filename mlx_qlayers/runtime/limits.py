"""What GPUs offer a threadgroup and a thread."""

from __future__ import annotations

import re
from functools import cache

import mlx.core as mx

from .backend import backend

# What every Apple GPU of MLX's offers a threadgroup.
MAX_THREADS = 1024
MAX_THREADGROUP_MEMORY = 32 * 1024
# What a kernel may declare there; only layouts of CUDA's own need more than Metal has.
CUDA_THREADGROUP_MEMORY = 48 * 1024
# What it may ask for besides, in KiB, where that is not as on GeForce.
_CUDA_SHARED = {"sm_80": 163, "sm_87": 163, "sm_90": 227, "sm_100": 227, "sm_103": 227}

# On M1 and M2: the largest threadgroup, by the 32-bit registers of a thread. A pipeline with 105
# to 128 was seen to take 384 threads; the other steps are Mesa's (agx_occupancy).
_THREADS = {52: 1024, 56: 896, 64: 832, 68: 768, 72: 704, 80: 640, 92: 576, 104: 512, 128: 384}
# What a thread needs beside its arrays: addresses, counters, operands on their way. Compiled for
# CUDA with 128 registers, qmv does not spill with arrays of 112 words and does with 136.
_OTHERS = 16


def most_threads(registers: int) -> int:
    """The largest threadgroup of M1 and M2, by the 32-bit words of a thread's arrays; 0 for none.

    Source: Mesa's AGX compiler; what Macs report for pipelines of MLX (mlx#2205, mlx#3885).

    Example:
        >>> most_threads(16), most_threads(88), most_threads(112), most_threads(113)
        (1024, 512, 384, 0)
    """
    steps = (most for limit, most in _THREADS.items() if registers + _OTHERS <= limit)
    return next(steps, 0)


def operand_bytes(dtype: mx.Dtype, device: str | None = None) -> int:
    """Bytes of an element of a matrix product: Apple GPUs before the M3 have bfloat widened."""
    widened = dtype == mx.bfloat16 and (device or backend()) == "metal" and has_few_registers()
    return 4 if widened else dtype.size


@cache
def cuda_shared_memory() -> int:
    """Bytes of shared memory of a threadgroup of this machine's NVIDIA GPU; else of an H200.

    Source: CUDA C++ Programming Guide, technical specifications per compute capability.
    """
    name = str(mx.device_info(mx.gpu).get("architecture")) if mx.cuda.is_available() else "sm_90"
    return _CUDA_SHARED.get(name, 99) * 1024


@cache
def has_few_registers() -> bool:
    """Whether the Apple GPU of this machine is an M1 or M2, or of a kind that does not say."""
    found = re.match(r"applegpu_g(\d+)", str(mx.device_info(mx.gpu).get("architecture")))
    return found is None or int(found[1]) < 15
