"""exp(x), element by element: the operation to learn from, with all that belongs to it.

Reading order: ``exp.metal`` holds the functions that run on the GPU, ``bind`` works out their
grids, and ``_plan`` joins them with MLX's own operator: it checks, chooses a path and gives the
gradient. A folder beside this one that has the same parts is another operation: doctor, the
sanitizer and the tests of all operations find it by its name and its :func:`examples`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...dispatch import Gradient, Operation, Plan, choose, dispatch
from ...runtime.kernel import Kernel
from ...runtime.launch import Bound
from ...runtime.spec import Spec
from ..signature import Signature

_FILE = Path("exp.metal")
FORWARD, GRADIENT = Kernel("exp_forward", _FILE), Kernel("exp_gradient", _FILE)
STRIDED = Kernel("exp_strided", _FILE, ensure_row_contiguous=False)
_TAKES = Signature("""
    x: float
    strided: flag
""")


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


class Exp(nn.Module):
    """``exp(x)``, element by element. A layer holds parameters, here none, and calls one operation.

    Shape:
        input and output (...), float32, float16 or bfloat16.

    Example:
        >>> Exp()(mx.zeros((2, 3))).shape
        (2, 3)

    Source: :func:`mlx_qlayers.ops.exp.exp`, where errors are described.
    """

    def __call__(self, x: mx.array) -> mx.array:
        return exp(x)


def bind(kernel: Kernel, *inputs: Spec) -> Bound:
    """The launch of a kernel with one thread for each element of its inputs.

    Args:
        kernel: :data:`FORWARD`, :data:`STRIDED` or :data:`GRADIENT`; MLX copies what is not
            contiguous but for the second, which needs at least one axis.
        inputs: specs of x, or of dy and y, all of one shape and dtype.
    """
    x = inputs[0]
    return kernel.bind(
        inputs,
        template={"T": x.dtype},
        grid=(x.size, 1, 1),  # it need not be whole threadgroups
        threadgroup=(256, 1, 1),
        output_shapes=[x.shape],
    )


def _plan(arrays: Sequence[Spec], strided: bool) -> Plan:
    (x,) = arrays
    _TAKES.check(x, strided)
    # A CPU runs MLX's own operator faster than any launch: there is no gain to give.
    choice = choose("exp", empty=None if x.size else "x is empty")
    if choice.path == "reference":
        return Plan(choice, mx.exp)
    # A kernel that asks for strides needs an axis to have them.
    flat = x if x.ndim else Spec((1,), x.dtype)
    forward, backward = bind(STRIDED if strided else FORWARD, flat), bind(GRADIENT, x, x)

    def run(x: mx.array) -> mx.array:
        return forward([x if x.ndim else x.reshape(1)])[0].reshape(x.shape)

    def gradient(_: object, cotangents: list[mx.array], outputs: list[mx.array]) -> list[mx.array]:
        return backward([cotangents[0], outputs[0]])

    return Plan(choice, run, (Gradient((0,), gradient),), mx.exp)


_EXP = Operation("exp", _plan)


def examples() -> Iterator[tuple[str, dict[str, Any], Sequence[str]]]:
    """Calls: what each is of, the arguments by name, and those that are differentiated."""
    for dtype in (mx.float16, mx.bfloat16):
        x = mx.random.normal((7, 41)).astype(dtype)
        yield str(dtype).removeprefix("mlx.core."), {"x": x}, ("x",)
    yield "strided", {"x": mx.random.normal((7, 41)).astype(mx.float16).T, "strided": True}, ()
