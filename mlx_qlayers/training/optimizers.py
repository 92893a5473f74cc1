"""Adam whose moments take a byte each."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

import mlx.core as mx
import mlx.optimizers as optim

BLOCK = 256  # numbers that share a scale
LEAST = 4096  # smaller arrays stay as they are
_DECADES = 7
O = TypeVar("O", bound=optim.Optimizer)  # noqa: E741


def in_8_bits(optimizer: O) -> O:
    """Have an Adam or AdamW that has not begun keep its moments in 8 bits.

    They are quantized in blocks of 256 to numbers whose precision is higher the larger they are, by
    the largest of the block; a step computes in float32. Arrays of fewer than 4,096 numbers keep
    moments of their own precision.

    Args:
        optimizer: of class ``mlx.optimizers.Adam`` or ``AdamW``; its class is changed.

    Returns:
        The optimizer.

    Raises:
        ValueError: it is of another class, or has taken steps.

    Example:
        >>> import mlx.nn as nn
        >>> model, optimizer = nn.Linear(64, 64, bias=False), in_8_bits(optim.Adam(1e-3))
        >>> optimizer.init(model.trainable_parameters())
        >>> state = optimizer.state["weight"]
        >>> state["m"].dtype, sum(a.nbytes for a in state.values()) / model.weight.size
        (mlx.core.uint8, 2.03125)

    Source: 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861.
    """
    if type(optimizer) not in _CLASSES:
        raise ValueError(f"moments in 8 bits are those of Adam or AdamW, not {_name(optimizer)}")
    if optimizer._initialized:
        raise ValueError(f"{_name(optimizer)} has moments already")
    optimizer.__class__ = _CLASSES[type(optimizer)]
    return optimizer


def _name(optimizer: Any) -> str:
    return type(optimizer).__name__


@cache
def values(signed: bool) -> tuple[list[float], list[float]]:
    """The 256 numbers, in order, and what lies in the middle between neighbours.

    Seven decades up to 1, of which each has twice as many as that below it; zero, and 1 itself.
    """
    found = [0.0, 1.0]
    for i in range(_DECADES):
        count = 2 ** (i + (not signed))
        steps = [0.1 + 0.9 * (n + 0.5) / count for n in range(count)]
        found += [
            sign * 10.0 ** (i + 1 - _DECADES) * x for x in steps for sign in (1, -1)[: 1 + signed]
        ]
    found.sort()
    return found, [(a + b) / 2 for a, b in pairwise(found)]


def packed(array: mx.array, signed: bool) -> tuple[mx.array, mx.array]:
    """Codes (blocks, 256) of numbers, and the largest of each block (blocks, 1)."""
    flat = array.astype(mx.float32).flatten()
    rows = mx.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    scales = mx.abs(rows).max(axis=1, keepdims=True)
    share = rows / mx.maximum(scales, 1e-38)
    between, codes = mx.array(values(signed)[1]), mx.zeros(rows.shape, mx.uint8)
    for bit in (128, 64, 32, 16, 8, 4, 2, 1):
        codes = codes + bit * (share >= between[codes + (bit - 1)]).astype(mx.uint8)
    return codes, scales


def unpacked(codes: mx.array, scales: mx.array, shape: tuple[int, ...], signed: bool) -> mx.array:
    """The numbers, in float32."""
    flat = (mx.array(values(signed)[0])[codes] * scales).flatten()
    return flat[: prod(shape)].reshape(shape)


class _Packed:
    """Goes before Adam: its states are packed between steps, the first moment with a sign."""

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        after: Any = super()
        after.init_single(parameter, state)
        if parameter.size >= LEAST:
            self._pack(state)

    def apply_single(
        self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]
    ) -> mx.array:
        after: Any = super()
        if parameter.size < LEAST:
            small: mx.array = after.apply_single(gradient, parameter, state)
            return small
        for name in ("m", "v"):
            given = state[name], state.pop(f"{name}_scales")
            state[name] = unpacked(*given, parameter.shape, name == "m")
        both = (a.astype(mx.float32) for a in (gradient, parameter))
        moved: mx.array = after.apply_single(*both, state)
        self._pack(state)
        return moved.astype(parameter.dtype)

    @staticmethod
    def _pack(state: dict[str, Any]) -> None:
        for name in ("m", "v"):
            state[name], state[f"{name}_scales"] = packed(state[name], name == "m")


class Adam(_Packed, optim.Adam):
    """``mlx.optimizers.Adam`` by moments of 8 bits."""


class AdamW(_Packed, optim.AdamW):
    """``mlx.optimizers.AdamW`` by moments of 8 bits."""


_CLASSES: dict[type, Any] = {optim.Adam: Adam, optim.AdamW: AdamW}
