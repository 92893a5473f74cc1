"""The gate of a feed-forward layer, silu(gate) * x, element by element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...dispatch import Gradient, Operation, Plan, choose, dispatch
from ...runtime.backend import current
from ...runtime.devices import device_of
from ...runtime.kernel import Kernel
from ...runtime.launch import Bound
from ...runtime.spec import Spec
from ..signature import Signature

_FILE = Path("swiglu.metal")
FORWARD, GRADIENT = Kernel("swiglu_forward", _FILE), Kernel("swiglu_gradient", _FILE)
# Contiguous elements of a thread on a GPU.
_COUNT = 8
_TAKES = Signature("""
    gate: float (*N)
    x: gate (*N)
""")


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """The product of ``silu(gate)`` and ``x``, computed in float32 and rounded once.

    Args:
        gate: (...), float32, float16 or bfloat16.
        x: (...), of the shape and dtype of ``gate``.

    Returns:
        An array of that shape and dtype. It can be differentiated once.

    Raises:
        ValueError: a dtype is another one, or the shapes differ.

    Example:
        >>> gate, x = mx.random.normal((2, 4, 16))
        >>> y, dx = mx.value_and_grad(lambda x: swiglu(gate, x).sum())(x)

    Source: mlx-lm's ``swiglu``; arXiv 2002.05202.
    """
    return dispatch(_SWIGLU, (gate, x))


def bind(kernel: Kernel, *inputs: Spec) -> Bound:
    """The launch of :data:`FORWARD` for gate and x, or of :data:`GRADIENT` for dy, gate and x."""
    x = inputs[-1]
    count = _COUNT if device_of().gpu and x.size % _COUNT == 0 else 1
    return kernel.bind(
        inputs,
        template={"T": x.dtype, "COUNT": count},
        grid=(x.size // count, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[x.shape] * (len(inputs) - 1),
    )


def by_mlx() -> bool:
    """Whether MLX has a kernel for it: gradients take five, and its bits are no product's."""
    now = current.get()
    return device_of().gpu and not (now.sparing or (now.invariant and device_of().tensor_cores))


@partial(mx.compile, shapeless=True)
def _stock(gate: mx.array, x: mx.array) -> mx.array:
    return nn.silu(gate) * x


def _plan(arrays: Sequence[Spec]) -> Plan:
    gate, x = arrays
    _TAKES.check(gate, x)
    why = "MLX makes one kernel of it on a GPU" if by_mlx() else None
    choice = choose("swiglu", empty=None if x.size else "x is empty", reason=why)
    if not x.size:  # on a GPU MLX's compiled functions divide by zero
        return Plan(choice, mx.multiply)
    if choice.path == "reference":
        return Plan(choice, _stock)
    forward, backward = bind(FORWARD, gate, x), bind(GRADIENT, x, gate, x)

    def gradient(given: Any, cotangents: list[mx.array], _: object) -> list[mx.array]:
        return backward([cotangents[0], *given])

    return Plan(choice, lambda *given: forward([*given])[0], (Gradient((0, 1), gradient),), _stock)


_SWIGLU = Operation("swiglu", _plan)


def examples() -> Iterator[tuple[str, dict[str, Any], Sequence[str]]]:
    """Calls: what each is of, the arguments by name, and those that are differentiated."""
    for dtype in (mx.float16, mx.bfloat16):
        gate, x = mx.random.normal((2, 7, 41)).astype(dtype)
        yield str(dtype).removeprefix("mlx.core."), {"gate": gate, "x": x}, ("gate", "x")
