"""The record of a device that kernels run on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import mlx.core as mx

# A file for each device that something is known of: its limits, and what was measured there.
FILES = Path(__file__).parents[2] / "measurements" / "data"

# The limits of a threadgroup on every Apple GPU of MLX's; kernels are declared within it.
MAX_THREADS = 1024
MAX_THREADGROUP_MEMORY = 32 * 1024

# On M1 and M2: the largest threadgroup, by the 32-bit registers of a thread. A pipeline with 105
# to 128 was seen to take 384 threads; the other steps are Mesa's (agx_occupancy).
_THREADS = {52: 1024, 56: 896, 64: 832, 68: 768, 72: 704, 80: 640, 92: 576, 104: 512, 128: 384}
# Registers of a thread beside its arrays: addresses, counters, operands on their way. Compiled for
# an NVIDIA GPU with 128 registers, qmv does not spill with arrays of 112 words and does with 136.
_OTHERS = 16


def most_threads(words: int) -> int:
    """The largest threadgroup of M1 and M2, by the 32-bit words of a thread's arrays; 0 for none.

    Source: Mesa's AGX compiler; what Macs report for pipelines of MLX (mlx#2205, mlx#3885).

    Example:
        >>> most_threads(16), most_threads(88), most_threads(112), most_threads(113)
        (1024, 512, 384, 0)
    """
    steps = (most for limit, most in _THREADS.items() if words + _OTHERS <= limit)
    return next(steps, 0)


@cache
def limits(device: str) -> dict[str, Any]:
    """The attributes that a device's file gives it."""
    path = FILES / f"{device}.json"
    found = json.loads(path.read_text()).get("limits", {}) if path.is_file() else {}
    return dict(found)


@dataclass(frozen=True)
class Device:
    """A device that kernels run on, as launch checks, rules and heuristics ask for it."""

    backend: str  # the name of the backend that runs kernels there
    name: str = ""  # its architecture, as `applegpu_g16s` or `sm_90`; "" where no such is here
    # The names of files whose measurements hold where it has none of its own.
    others: tuple[str, ...] = ()
    # The facts of MLX's that may name its file; the first that is told does.
    named_by: tuple[str, ...] = ("architecture", "device_name")
    cores: int = 0  # multiprocessors among which products are divided; 0 where nobody divides
    kernels: bool = True  # kernels run there; else there are MLX's own operators alone
    gpu: bool = True  # threads run side by side
    launches_at_once: bool = False  # a launch computes as it is called, and is no node of a graph
    # Kernels were measured on such devices, so that there are rules. Else `auto` keeps to stock
    # operators until something was measured on this machine.
    measured: bool = True
    needs_proof: bool = False  # `auto` only launches what was proven in this installation
    threadgroup_memory: int = MAX_THREADGROUP_MEMORY  # bytes that a kernel may declare
    dynamic_memory: int = 0  # bytes that it may ask for in their place
    most_operations: float = inf  # of one launch, where a longer one would hold up the screen
    # Threadgroups that are too large for their threads' registers are refused, as on M1 and M2.
    # Their matrix products widen bfloat, too.
    few_registers: bool = False
    spills: bool = False  # configurations may take more registers than M1 and M2 have
    # Products of SIMD-group matrices run on units that multiply faster than the others.
    tensor_cores: bool = False
    tensor_units: bool = False  # such units are there for Metal 4's tensor operations alone
    warpgroup_products: bool = False  # four SIMD groups multiply at once, from shared memory
    stock_is_tf32: bool = False  # MLX rounds float32 to TF32 in its own products
    stock_is_cudnn: bool = False  # MLX's attention is cuDNN's
    stock_needs_alignment: bool = False  # MLX's products misread views into a buffer's middle
    stock_has_gated_delta: bool = False  # mlx-lm has a kernel of the gated delta rule
    stock_compiles: bool = False  # MLX compiles its own kernels when they are first asked for
    stock_least_bits: int = 1  # of the packed matrices that MLX's products take
    orders_threadgroups: bool = False  # one sees what others wrote in the same launch
    integer_rows: bool = False  # products of packed codes may round rows to 8 bits on their way
    launches_views: bool = False  # launches take and give parts of larger arrays
    append_rows: int = 0  # of an append buffer; 0 where they go by what a token writes

    def operand_bytes(self, dtype: mx.Dtype) -> int:
        """Bytes of an element that is an operand of a matrix product."""
        return 4 if self.few_registers and dtype == mx.bfloat16 else dtype.size
