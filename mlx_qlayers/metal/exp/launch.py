"""exp(x), element by element: the kernels to learn from.

Reading order: ``exp/exp.metal`` holds the functions that run on the GPU. Below, three ``Kernel``
declarations say what they take, ``_launch`` works out a grid for them, and ``mx.custom_function``
joins a forward kernel and the gradient kernel into one operation that ``mx.grad`` understands.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ...runtime.backend import choose
from ...runtime.kernel import Kernel

_FORWARD = Kernel("exp_forward", "exp/exp.metal", inputs=("x",), outputs=("y",), template=("T",))
_STRIDED = Kernel(
    "exp_strided",
    "exp/exp.metal",
    inputs=("x",),
    outputs=("y",),
    template=("T",),
    ensure_row_contiguous=False,
)
_GRADIENT = Kernel("exp_gradient", "exp/exp.metal", ("dy", "y"), outputs=("dx",), template=("T",))


def exp(x: mx.array, *, strided: bool = False) -> mx.array:
    """The exponential of every element, computed in float32 and rounded once.

    Args:
        x: an array of any shape; float32, float16 or bfloat16.
        strided: read ``x`` where it lies. Otherwise a transposed or sliced ``x`` is copied first.

    Returns:
        An array of the shape and dtype of ``x``. It can be differentiated once.

    Raises:
        ValueError: ``x`` has another dtype.

    Example:
        >>> x = mx.random.normal((4, 16))
        >>> y, dx = mx.value_and_grad(lambda x: exp(x).sum())(x)

    Source: the first example of "Custom Metal Kernels" in MLX's documentation.
    """
    if x.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        raise ValueError(f"x must be float32, float16 or bfloat16, not {x.dtype}")
    nothing = "x is empty" if x.size == 0 else None
    path = choose("exp", ("metal", "cuda", "host"), unless=nothing)
    if path == "ops" or nothing:
        return mx.exp(x)
    y: Any = _exp_strided(x) if strided else _exp(x)
    return y


def _launch(kernel: Kernel, *inputs: mx.array) -> mx.array:
    """One thread for each element. The grid need not be whole threadgroups of 256."""
    x = inputs[0]
    (out,) = kernel(
        inputs,
        template={"T": x.dtype},
        grid=(x.size, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[x.shape],
    )
    return out


@mx.custom_function
def _exp(x: mx.array) -> mx.array:
    return _launch(_FORWARD, x)


@mx.custom_function
def _exp_strided(x: mx.array) -> mx.array:
    # A kernel that asks for strides needs an axis to have them.
    return _launch(_STRIDED, x if x.ndim else x.reshape(1)).reshape(x.shape)


def _vjp(x: mx.array, dy: mx.array, y: mx.array) -> mx.array:
    return _launch(_GRADIENT, dy, y)


_exp.vjp(_vjp)
_exp_strided.vjp(_vjp)
