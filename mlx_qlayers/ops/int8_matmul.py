"""Product of many rows with a matrix of 8-bit integers: checks, path and gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..dispatch import KERNELS, Gradient, Operation, Plan, choose, dispatch
from ..metal.int8.launch import DEPTH, int8_rows
from ..metal.int8.launch import int8_products as launches
from ..metal.quantized_matmul.qmv import Gate
from ..reference.int8_matmul import int8_matmul as reference
from ..reference.int8_matmul import rotated
from ..runtime import tensor_ops
from ..runtime.devices import device_of
from .fused_products import ACTIVATIONS
from .signature import Signature


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
    return int8_products(x, w, scales, bias)[0]


def int8_products(
    x: mx.array,
    *flat: mx.array | None,
    other: mx.array | None = None,
    block: int = 0,
    eps: float | None = None,
    gate: Gate | None = None,
) -> list[mx.array]:
    """The products of one input with several matrices, which is rounded once.

    Args:
        x: as for :func:`int8_matmul`.
        flat: w, scales and bias or None of each matrix.
        other: in the dtype of ``x``: with a gate what its activation is multiplied by, in the shape
            of ``x``; with ``eps`` the weight (K,) of the norm, or None.
        block: columns of what is rounded that are mixed first, as those of the matrices were
            (:func:`~mlx_qlayers.reference.int8_matmul.rotated`); 0 for none.
        eps: of an RMS norm that ``x`` goes through first; None for no norm.
        gate: the activation of ``x`` where ``activation(x) * other`` is multiplied.

    Raises:
        ValueError: as :func:`int8_matmul`.

    Example:
        >>> w = mx.ones((8, 64), mx.int8), mx.ones(8), None
        >>> [y.shape for y in int8_products(mx.ones((3, 64), mx.float16), *w, *w)]
        [(3, 8), (3, 8)]
    """
    return dispatch(_INT8_PRODUCTS, (x, other, *flat), (block, eps, gate))


_TAKES = Signature("""
    x: float (..., K)
    other: x (..., K) or None
    w: int8 (N, K)
    scales: float32 (N,)
    bias: x (N,) or None
""")


def _plan(arrays: Sequence[Any], block: int, eps: float | None, gate: Gate | None) -> Plan:
    x, other, *flat = arrays
    matrices = [flat[i : i + 3] for i in range(0, len(flat), 3)]
    for matrix in matrices:
        _TAKES.check(x, other, *matrix)
    lacking = _lacking(x, min(w.shape[0] for w, *_ in matrices))
    choice = choose("int8_matmul", () if lacking else KERNELS, unless=lacking)

    def prepared(x: mx.array, other: Any = None) -> mx.array:
        if gate is not None:
            x = ACTIVATIONS[gate](x) * other
        return rotated(x if eps is None else mx.fast.rms_norm(x, other, eps), block)

    def composed(x: mx.array, other: mx.array | None, *flat: Any) -> list[mx.array]:
        x = prepared(x, other)
        return [reference(x, *flat[i : i + 3]) for i in range(0, len(flat), 3)]

    def of_rows(arrays: Any, cotangents: list[mx.array], _: object) -> Sequence[mx.array]:
        x, other, *flat = arrays
        pairs = zip(cotangents, flat[::3], flat[1::3], strict=True)
        dx: Any = sum((dy * s) @ w.astype(mx.float32) for dy, w, s in pairs)
        given = [x] if other is None else [x, other]
        return mx.vjp(prepared, given, [dx.astype(x.dtype)])[1]

    products = composed
    if choice.path != "reference":
        rows = int8_rows(x, other, block, eps, gate)
        products = launches(rows, x, [(w.shape[0], bias is not None) for w, _, bias in matrices])
    of = (0,) if other is None else (0, 1)
    return Plan(choice, products, (Gradient(of, of_rows),), composed)


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


_INT8_PRODUCTS = Operation("int8_matmul", _plan)
