"""mish(x), element by element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...dispatch import Gradient, Operation, Plan, choose, dispatch
from ...runtime.kernel import Kernel
from ...runtime.spec import Spec
from ..exp import bind
from ..signature import Signature

_FILE = Path("mish.metal")
FORWARD, GRADIENT = Kernel("mish_forward", _FILE), Kernel("mish_gradient", _FILE)
_TAKES = Signature("x: float")


def mish(x: mx.array) -> mx.array:
    """``x tanh(log(1 + e^x))`` of every element, computed in float32 and rounded once.

    Args:
        x: an array of any shape; float32, float16 or bfloat16.

    Returns:
        An array of the shape and dtype of ``x``. It can be differentiated once.

    Raises:
        ValueError: ``x`` has another dtype.

    Example:
        >>> mish(mx.zeros((2, 3))).shape
        (2, 3)

    Source: arXiv 1908.08681; ``mlx.nn.mish``.
    """
    return dispatch(_MISH, (x,))


class Mish(nn.Module):
    """``mish(x)``, element by element.

    Shape:
        input and output (...), float32, float16 or bfloat16.

    Example:
        >>> Mish()(mx.zeros((2, 3))).shape
        (2, 3)

    Source: :func:`mlx_qlayers.ops.mish.mish`, where errors are described.
    """

    def __call__(self, x: mx.array) -> mx.array:
        return mish(x)


def _composed(x: mx.array) -> mx.array:
    return nn.mish(x.astype(mx.float32)).astype(x.dtype)


def _plan(arrays: Sequence[Spec]) -> Plan:
    (x,) = arrays
    _TAKES.check(x)
    choice = choose("mish", unless=None if x.size else "x is empty")
    if choice.path == "reference" or not x.size:
        return Plan(choice._replace(path="reference"), _composed)
    forward, backward = bind(FORWARD, x), bind(GRADIENT, x, x)

    def gradient(arrays: Any, cotangents: list[mx.array], _: object) -> list[mx.array]:
        return backward([cotangents[0], arrays[0]])

    return Plan(choice, lambda x: forward([x])[0], (Gradient((0,), gradient),), _composed)


_MISH = Operation("mish", _plan)


def examples() -> Iterator[tuple[str, dict[str, Any], Sequence[str]]]:
    """Calls: what each is of, the arguments by name, and those that are differentiated."""
    for dtype in (mx.float16, mx.bfloat16):
        x = mx.random.normal((7, 41)).astype(dtype)
        yield str(dtype).removeprefix("mlx.core."), {"x": x}, ("x",)
