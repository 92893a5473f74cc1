"""Launches the kernels of ``exp.metal``: the launchers to learn from.

A launcher takes the specs of its arrays (shape and dtype), works out template, grid and
threadgroup, and binds the kernel to them. What it returns is called with arrays.
"""

from __future__ import annotations

from ...runtime.kernel import Kernel
from ...runtime.launch import Bound
from ...runtime.spec import Spec

_FORWARD = Kernel("exp_forward", "exp/exp.metal")
_STRIDED = Kernel("exp_strided", "exp/exp.metal", ensure_row_contiguous=False)
_GRADIENT = Kernel("exp_gradient", "exp/exp.metal")


def exp(x: Spec, strided: bool) -> Bound:
    """The launch that computes ``[exp(x)]`` from ``[x]``.

    Args:
        x: of any shape, but at least one axis if ``strided``; float32, float16 or bfloat16.
        strided: read ``x`` where it lies, by its strides; else MLX copies what is not contiguous.
    """
    return _elementwise(_STRIDED if strided else _FORWARD, x)


def exp_gradient(y: Spec) -> Bound:
    """The launch that computes ``[dx]`` from ``[dy, y]``, all of one shape and dtype."""
    return _elementwise(_GRADIENT, y, y)


def _elementwise(kernel: Kernel, *inputs: Spec) -> Bound:
    """One thread for each element. The grid need not be whole threadgroups of 256."""
    x = inputs[0]
    return kernel.bind(
        inputs,
        template={"T": x.dtype},
        grid=(x.size, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[x.shape],
    )
