"""Whether the matrix hardware that Metal 4's tensor operations reach is here."""

from __future__ import annotations

import platform
import re
from functools import cache
from typing import Any

import mlx.core as mx

from .source import TENSOR_OPS

# As MLX asks: from here on operations run on matrix units of their own, on phones one later.
_GENERATION, _OF_PHONES = 17, 18
# Cooperative inputs and bfloat.
_SYSTEM = (26, 2)


@cache
def missing() -> str | None:
    """Why kernels of tensor operations do not run here, or None where they do.

    Example:
        >>> missing() is None or isinstance(missing(), str)
        True
    """
    if not mx.metal.is_available():
        return "there is no Apple GPU"
    name = str(mx.device_info().get("architecture"))
    found = re.match(r"applegpu_g(\d+)(p?)", name)
    least = _OF_PHONES if found and found[2] else _GENERATION
    if found is None or int(found[1]) < least:
        return f"the GPU is {name}, and matrix units come with generation {least}"
    version = platform.mac_ver()[0]
    if tuple(map(int, version.split(".")[:2])) < _SYSTEM:
        return f"macOS is {version}, not 26.2"
    return None if _has_header() else f"Metal's compiler here has no {TENSOR_OPS}"


def _has_header() -> bool:
    """Whether the compiler has the header, with tensors in it; asked by a kernel of one thread."""
    kernel: Any = mx.fast.metal_kernel(
        name="has_tensor_ops",
        input_names=["x"],
        output_names=["y"],
        source="y[thread_position_in_grid.x] = HAS_TENSOR_OPS * x[0];",
        header=f"""
#if __METAL_VERSION__ >= 400 && defined(__HAVE_TENSOR__) && __has_include({TENSOR_OPS})
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
