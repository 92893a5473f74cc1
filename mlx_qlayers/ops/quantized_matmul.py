"""Product with a quantized matrix: checks, and the choice between kernel and reference."""

from __future__ import annotations

import mlx.core as mx

from ..formats import Format
from ..reference import quantized_matmul as reference
from ..runtime.backend import choose

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    bias: mx.array | None = None,
) -> mx.array:
    """Multiply with a quantized matrix, and add a bias.

    Takes the arguments and gives the results of ``mx.quantized_matmul``, rounded once from
    float32 sums.

    Args:
        x: (..., K) in float32, float16 or bfloat16; any strides, any number of rows.
        w: (N, K * bits / 32) uint32, or (K, N * bits / 32) if not ``transpose``; leading
            dimensions broadcast against those of ``x``.
        scales: one a group along the last axis of the matrix; floating point (affine), or uint8
            holding E8M0 (mxfp4, mxfp8) or E4M3 (nvfp4).
        biases: one a group (affine), else None.
        transpose: multiply with the transpose of the packed matrix.
        group_size: elements that share a scale; None stands for the mode's default (affine: 64).
        bits: bits an element; None stands for the mode's default (affine: 4).
        mode: ``"affine"``, ``"mxfp4"``, ``"mxfp8"`` or ``"nvfp4"``.
        bias: (N,) added to every row of the product.

    Returns:
        (..., N) in the dtype of ``x`` (affine: that of ``x`` and ``scales`` promoted).

    Raises:
        ValueError: an argument has a shape, dtype or value that does not fit; it is named.

    Example:
        >>> w, scales, biases = mx.quantize(mx.random.normal((128, 256)), group_size=64, bits=4)
        >>> quantized_matmul(mx.ones((3, 256)), w, scales, biases).shape
        (3, 128)

    Source: ``mx.quantized_matmul``.
    """
    fmt = Format.checked(group_size, bits, mode)
    _check(x, w, scales, biases, transpose, fmt, bias)
    choose("quantized_matmul")
    y = reference.quantized_matmul(x, w, scales, biases, transpose, fmt)
    return y if bias is None else y + bias


def _check(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    transpose: bool,
    fmt: Format,
    bias: mx.array | None,
) -> None:
    if x.dtype not in _FLOATS:
        raise ValueError(f"x must be float32, float16 or bfloat16, not {x.dtype}")
    if x.ndim < 1 or w.ndim < 2:
        raise ValueError(
            f"x needs at least 1 dimension and w at least 2, not shapes {x.shape} and {w.shape}"
        )
    if problem := fmt.mismatch(w, scales, biases):
        raise ValueError(problem)
    dims = fmt.dims(w)
    inner, outer = (dims, w.shape[-2]) if transpose else (w.shape[-2], dims)
    if x.shape[-1] != inner:
        raise ValueError(
            f"x of shape {x.shape} must have {inner} columns to go with w of shape {w.shape} "
            f"(transpose={transpose}, group_size={fmt.group_size}, bits={fmt.bits})"
        )
    if bias is not None and bias.shape != (outer,):
        raise ValueError(f"bias must have shape ({outer},), not {bias.shape}")
