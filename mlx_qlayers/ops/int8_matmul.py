"""Product of many rows with a matrix of 8-bit integers: checks, path and gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..dispatch import Gradient, Operation, Plan, choose, dispatch
from ..metal.int8.launch import DEPTH, int8_product
from ..reference.int8_matmul import int8_matmul as reference
from ..runtime import tensor_ops
from ..runtime.backend import backend
from ..runtime.cuda_ahead import device_architecture
from .checks import check_floats


def int8_matmul(
    x: mx.array, w: mx.array, scales: mx.array, bias: mx.array | None = None
) -> mx.array:
    """Multiply rows, each rounded to 8 bits with a scale of its own, with a matrix of 8 bits.

    The sums are exact in int32; scales and bias are applied in float32, and the result is rounded
    once. Rounding a row costs up to 1/254 of its largest element.

    Args:
        x: (..., K) in float16 or bfloat16 (the reference also takes float32).
        w: (N, K) int8, from -127 to 127.
        scales: (N,) float32.
        bias: (N,) in the dtype of ``x``.

    Returns:
        (..., N) in the dtype of ``x``. Its gradient for ``x`` is that without rounding.

    Raises:
        ValueError: an argument has a shape or dtype that does not fit; it is named.

    Example:
        >>> x, w = mx.random.normal((3, 64)), mx.full((8, 64), 2, mx.int8)
        >>> int8_matmul(x.astype(mx.float16), w, mx.ones(8)).shape
        (3, 8)

    Source: LLM.int8() (Dettmers et al. 2022), without its outliers.
    """
    y: mx.array = dispatch(_INT8_MATMUL, (x, w, scales, bias))
    return y


def _plan(arrays: Sequence[Any]) -> Plan:
    x, w, scales, bias = arrays
    check_floats("x", x)
    if w.dtype != mx.int8 or w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"w must be int8 (N, K) with the K of x {x.shape}, not {w.dtype} {w.shape}"
        )
    n, k = w.shape
    if scales.dtype != mx.float32 or scales.shape != (n,):
        raise ValueError(f"scales must be float32 ({n},), not {scales.dtype} {scales.shape}")
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype):
        raise ValueError(f"bias must be {x.dtype} ({n},), not {bias.dtype} {bias.shape}")
    lacking = _lacking(x, n, k)
    choice = choose("int8_matmul", () if lacking else ("metal", "cuda", "host"), unless=lacking)

    def of_x(arrays: Any, cotangents: list[mx.array], _: object) -> list[mx.array]:
        (dy,), (x, w, scales, *_) = cotangents, arrays
        return [((dy * scales) @ w.astype(mx.float32)).astype(x.dtype)]

    run = reference if choice.path == "ops" else int8_product(x, n, bias is not None)
    return Plan(choice, run, (Gradient((0,), of_x),), reference)


def _lacking(x: Any, n: int, k: int) -> str | None:
    """Why no kernel takes these arguments, if none does."""
    if x.dtype == mx.float32:
        return "float32 rows keep their digits"
    if not x.size or not n:
        return "the product is empty"
    if k % DEPTH:
        return f"its depth {k} is no multiple of {DEPTH}"
    if backend() == "metal" and (why := tensor_ops.missing()):
        return why
    architecture = device_architecture()
    if backend() == "cuda" and architecture not in ("", "sm_90"):
        return f"products of 8-bit integers are written for sm_90, not {architecture}"
    return None


_INT8_MATMUL = Operation("int8_matmul", _plan)
