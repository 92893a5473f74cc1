"""Product of many rows with a matrix of 8-bit integers: checks, path and gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..dispatch import Gradient, Operation, Plan, choose, dispatch
from ..metal.int8.launch import DEPTH, int8_product
from ..reference.int8_matmul import int8_matmul as reference
from ..reference.int8_matmul import rotated
from ..runtime import tensor_ops
from ..runtime.devices import device_of
from .signature import Signature


def int8_matmul(
    x: mx.array, w: mx.array, scales: mx.array, bias: mx.array | None = None, *, block: int = 0
) -> mx.array:
    """Multiply rows, each rounded to 8 bits with a scale of its own, with a matrix of 8 bits.

    The sums are exact in int32; scales and bias are applied in float32, and the result is rounded
    once. Rounding a row costs up to 1/254 of its largest element.

    Args:
        x: (..., K) in float16 or bfloat16 (the reference also takes float32).
        w: (N, K) int8, from -127 to 127.
        scales: (N,) float32.
        bias: (N,) in the dtype of ``x``.
        block: columns of ``x`` that are mixed before they are rounded, as those of ``w`` were
            (:func:`~mlx_qlayers.reference.int8_matmul.rotated`): 16, 32, 64 or 128; 0 for none.

    Returns:
        (..., N) in the dtype of ``x``. Its gradient for ``x`` is that without rounding.

    Raises:
        ValueError: an argument has a shape, dtype or value that does not fit; it is named.

    Example:
        >>> x, w = mx.random.normal((3, 64)), mx.full((8, 64), 2, mx.int8)
        >>> int8_matmul(x.astype(mx.float16), w, mx.ones(8)).shape
        (3, 8)

    Source: LLM.int8() (Dettmers et al. 2022), without its outliers.
    """
    return dispatch(_INT8_MATMUL, (x, w, scales, bias), (block,))


_TAKES = Signature("""
    x: float (..., K)
    w: int8 (N, K)
    scales: float32 (N,)
    bias: x (N,) or None
    block: int
""")
_BLOCKS = 0, 16, 32, 64, 128


def _plan(arrays: Sequence[Any], block: int) -> Plan:
    columns = _TAKES.check(*arrays, block)["K"]
    if block not in _BLOCKS or (block and columns % block):
        raise ValueError(f"block must be one of {_BLOCKS} and divide {columns}, not {block}")
    x, w, _, bias = arrays
    lacking = _lacking(x, w.shape[0])
    choice = choose("int8_matmul", not lacking, reason=lacking)

    def composed(x: mx.array, *matrix: Any) -> mx.array:
        return reference(rotated(x, block), *matrix)

    def of_rows(arrays: Any, cotangents: list[mx.array], _: object) -> Sequence[mx.array]:
        (x, w, scales, _), (dy,) = arrays, cotangents
        dx: Any = (dy * scales) @ w.astype(mx.float32)
        return mx.vjp(lambda x: [rotated(x, block)], [x], [dx.astype(x.dtype)])[1]

    product: Callable[..., mx.array] = composed
    if choice.path != "reference":
        product = int8_product(x, w.shape[0], bias is not None, block)
    return Plan(choice, product, (Gradient((0,), of_rows),), composed)


def _lacking(x: Any, n: int) -> str | None:
    """Why no kernel takes these arguments, if none does."""
    if x.dtype == mx.float32:
        return "float32 rows keep their digits"
    if not x.size or not n:
        return "the product is empty"
    if (k := x.shape[-1]) % DEPTH:
        return f"its depth {k} is no multiple of {DEPTH}"
    if (device := device_of()).tensor_cores:
        if device.name and not device.warpgroup_products:
            return f"products of 8-bit integers are written for sm_90, not {device.name}"
        return None
    return tensor_ops.missing() if device.gpu else None


_INT8_MATMUL = Operation("int8_matmul", _plan)
