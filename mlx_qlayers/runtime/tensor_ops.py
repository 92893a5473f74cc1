"""Whether the matrix hardware that Metal 4's tensor operations reach is here."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import mlx.core as mx

from .devices import device_of
from .devices.record import Device
from .macos import macos_version
from .source import TENSOR_OPS

# Cooperative inputs and bfloat; packed codes as operands.
_SYSTEM, _SYSTEM_OF_CODES = (26, 2), (26, 4)


def missing() -> str | None:
    """Why kernels of tensor operations do not run here, or None where they do."""
    return _missing(device_of())


@cache
def _missing(device: Device) -> str | None:
    if not device.tensor_units:
        name = device.name or device.backend
        return f"the device is {name}, and matrix units come with the M5"
    if why := _too_old(_SYSTEM):
        return why
    return None if _defines("__HAVE_TENSOR__") else f"Metal's compiler here has no {TENSOR_OPS}"


def missing_codes() -> str | None:
    """Why packed codes of 4 bits are no operands of them here, or None where they are."""
    if why := missing() or _too_old(_SYSTEM_OF_CODES):
        return why
    has = _defines("__HAVE_INT4B_FORMAT_TYPE__")
    return None if has else "Metal's compiler here has no uint4b_format"


def stock_rounds() -> bool:
    """Whether MLX's own products of float32 round to TF32 here, unless it is told not to."""
    rounds = device_of().stock_is_tf32 or missing() is None
    return rounds and os.environ.get("MLX_ENABLE_TF32") != "0"


def _too_old(least: tuple[int, int]) -> str | None:
    if (version := macos_version()) >= least:
        return None
    return "macOS is {}.{}, not {}.{}".format(*version, *least)


@cache
def _defines(macro: str) -> bool:
    """Whether the compiler has the header, and defines this; asked by a kernel of one thread."""
    kernel: Any = mx.fast.metal_kernel(
        name=f"defines{macro.lower()}",
        input_names=["x"],
        output_names=["y"],
        source="y[thread_position_in_grid.x] = HAS_TENSOR_OPS * x[0];",
        header=f"""
#if __METAL_VERSION__ >= 400 && defined({macro}) && __has_include({TENSOR_OPS})
#define HAS_TENSOR_OPS 1
#else
#define HAS_TENSOR_OPS 0
#endif
""",
    )
    (y,) = kernel(
        inputs=[mx.ones((8,), mx.int32)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return bool(y.item())
