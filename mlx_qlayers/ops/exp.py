"""exp(x), element by element: the operation to learn from.

Reading order: ``metal/exp/exp.metal`` holds the functions that run on the GPU,
``metal/exp/launch.py`` works out their grids, ``reference/exp.py`` is the same function in MLX's
operators, and ``_plan`` below joins them: it checks, chooses a path and gives the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..dispatch import Gradient, Operation, Plan, choose, dispatch
from ..metal.exp import launch
from ..reference import exp as reference
from ..runtime.spec import Spec
from .signature import Signature


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
    return dispatch(_EXP, (x,), (strided,))


def _plan(arrays: Sequence[Spec], strided: bool) -> Plan:
    (x,) = arrays
    _TAKES.check(x, strided)
    # A CPU runs MLX's own operator faster than any launch: there is no gain to give.
    choice = choose("exp", unless=None if x.size else "x is empty")
    if choice.path == "reference" or not x.size:
        return Plan(choice._replace(path="reference"), reference.exp)
    # A kernel that asks for strides needs an axis to have them.
    flat = x if x.ndim else Spec((1,), x.dtype)
    forward, backward = launch.exp(flat, strided), launch.exp_gradient(x)

    def run(x: mx.array) -> mx.array:
        return forward([x if x.ndim else x.reshape(1)])[0].reshape(x.shape)

    def gradient(_: object, cotangents: list[mx.array], outputs: list[mx.array]) -> list[mx.array]:
        return backward([cotangents[0], outputs[0]])

    return Plan(choice, run, (Gradient((0,), gradient),), reference.exp)


_TAKES = Signature("""
    x: float
    strided: flag
""")
_EXP = Operation("exp", _plan)
