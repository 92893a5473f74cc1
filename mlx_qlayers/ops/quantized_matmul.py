"""Product with a quantized matrix: checks, and the gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import mlx.core as mx

from ..formats import GLOBAL_UNIT, Format
from ..runtime.backend import backend
from .differentiable import gradients_are_left_out
from .quantized_gradients import scales_and_biases
from .quantized_paths import Way, is_forced_to_reference, product, way
from .traced import place, traced

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
    global_scale: mx.array | None = None,
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
        global_scale: one number for the matrix in mode nvfp4, as ``mx.quantize`` takes it. The
            stock operator has no such argument; it is applied to the float32 sums.

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
    arrays, options = (
        (x, w, scales, biases, bias, global_scale),
        (transpose, group_size, bits, mode),
    )
    within = gradients_are_left_out()
    if not within and (at := place()) is not None:
        try:
            run = _traced(at, *options)
        except TypeError:
            pass  # an option that cannot be a key: the checks name it
        else:
            return cast(mx.array, run(*arrays))
    return _product(*arrays, *options, alone=not within)


@partial(traced, counted=True)
def _traced(*options: Any) -> Callable[..., mx.array]:
    # What is not traced ahead is part of what somebody traces or differentiates.
    return lambda *arrays: _product(*arrays, *options, alone=gradients_are_left_out())


def _product(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    bias: mx.array | None,
    global_scale: mx.array | None,
    transpose: bool,
    group_size: int | None,
    bits: int | None,
    mode: str,
    *,
    alone: bool,
) -> mx.array:
    """The product; ``alone`` if each call of it costs the Python that it takes to call it."""
    fmt = Format.checked(group_size, bits, mode)
    _check(x, w, scales, biases, transpose, fmt, bias)
    if global_scale is not None:
        return _with_global_scale(x, w, scales, transpose, fmt, bias, global_scale)
    if is_forced_to_reference() or w.ndim > 2:
        chosen = way("quantized_matmul", x, w, scales, transpose, fmt, alone)
        return product(chosen, x, w, scales, biases, bias, transpose, fmt)
    out = x.dtype
    if biases is not None:
        out = mx.result_type(x, scales, biases)
        scales, biases = _alike(scales, biases)
    # A bias of more precision than the product is added to it afterwards, as stock layers do.
    fused = bias is not None and bias.dtype == out
    arrays = (x.astype(out), w, scales, biases, bias if fused else None)
    chosen = way("quantized_matmul", *arrays[:3], transpose, fmt, alone)
    if gradients_are_left_out():
        y = product(chosen, *arrays, transpose, fmt)
    else:
        differentiable = _at_once if backend() == "host" and biases is not None else _lazily
        present = [a for a in arrays if a is not None]
        y = differentiable(chosen, fmt, transpose, biases is not None, fused)(*present)
    return y if bias is None or fused else y + bias


def _with_global_scale(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    transpose: bool,
    fmt: Format,
    bias: mx.array | None,
    global_scale: mx.array,
) -> mx.array:
    if problem := fmt.mismatch_of_global(global_scale, 1):
        raise ValueError(problem)
    y = quantized_matmul(x.astype(mx.float32), w, scales, transpose=transpose, mode=fmt.mode)
    y = y * (global_scale.reshape(()).astype(mx.float32) / GLOBAL_UNIT)
    if bias is None:
        return y.astype(x.dtype)
    return (y + bias).astype(mx.result_type(x, bias))


def _alike(scales: mx.array, biases: mx.array) -> tuple[mx.array, mx.array]:
    if scales.dtype == biases.dtype:
        return scales, biases
    dtype = mx.result_type(scales, biases)
    return scales.astype(dtype), biases.astype(dtype)


class _Gradients:
    """The product as a function of the arrays that are not None, and its gradients."""

    def __init__(self, chosen: Way, fmt: Format, transpose: bool, affine: bool, biased: bool):
        self.chosen, self.fmt, self.transpose = chosen, fmt, transpose
        self.affine, self.biased = affine, biased

    def forward(self, x: mx.array, w: mx.array, scales: mx.array, *rest: mx.array) -> mx.array:
        biases, bias = rest[0] if self.affine else None, rest[-1] if self.biased else None
        return product(self.chosen, x, w, scales, biases, bias, self.transpose, self.fmt)

    def of_x(self, dy: mx.array, w: mx.array, scales: mx.array, *rest: mx.array) -> mx.array:
        biases, transpose = rest[0] if self.affine else None, not self.transpose
        back = way("quantized_matmul, gradient of x", dy, w, scales, transpose, self.fmt)
        return product(back, dy, w, scales, biases, None, transpose, self.fmt)

    def of_numbers(
        self, x: mx.array, dy: mx.array, w: mx.array, scales: mx.array, biases: mx.array
    ) -> tuple[mx.array, mx.array]:
        return scales_and_biases(x, dy, w, scales, biases, self.fmt, self.transpose)

    def of_bias(self, dy: mx.array) -> list[mx.array]:
        """No array where there is no bias."""
        rows = dy.reshape(-1, dy.shape[-1]).astype(mx.float32)
        return [rows.sum(0).astype(dy.dtype)] if self.biased else []


@cache
def _lazily(*options: Any) -> Callable[..., mx.array]:
    """The product where launches are lazy: gradients that nobody asks for are never computed."""
    parts = _Gradients(*options)
    function = mx.custom_function(parts.forward)

    @function.vjp
    def _(arrays: tuple[mx.array, ...], dy: mx.array, y: mx.array) -> list[mx.array]:
        x, *packed = arrays[: 4 if parts.affine else 3]
        numbers = (
            parts.of_numbers(x, dy, *packed) if parts.affine else map(mx.zeros_like, packed[1:])
        )
        return [parts.of_x(dy, *packed), mx.zeros_like(packed[0]), *numbers, *parts.of_bias(dy)]

    return cast(Callable[..., mx.array], function)


@cache
def _at_once(*options: Any) -> Callable[..., mx.array]:
    """The product where launches run at once: scales and biases get a gradient if asked for.

    They pass an identity first. MLX asks for its gradient only where it needs that, and the
    gradient of the product comes to it along an argument that carries nothing else.
    """
    parts = _Gradients(*options)

    @mx.custom_function
    def hold(
        scales: mx.array, biases: mx.array, carrier: mx.array, x: mx.array, w: mx.array
    ) -> tuple[mx.array, ...]:
        return scales, biases, carrier

    @hold.vjp
    def _(
        arrays: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], _: object
    ) -> tuple[mx.array, ...]:
        scales, biases, carrier, x, w = arrays
        numbers = parts.of_numbers(x, cotangents[2], w, scales, biases)
        return *numbers, *map(mx.zeros_like, (carrier, x, w))

    @mx.custom_function
    def whole(carrier: mx.array, *arrays: mx.array) -> mx.array:
        return parts.forward(*arrays)

    @whole.vjp
    def _(arrays: tuple[mx.array, ...], dy: mx.array, y: mx.array) -> list[mx.array]:
        packed = arrays[2:5]
        return [dy, parts.of_x(dy, *packed), *map(mx.zeros_like, packed), *parts.of_bias(dy)]

    def function(x: mx.array, w: mx.array, *rest: mx.array) -> mx.array:
        n = w.shape[0] if parts.transpose else parts.fmt.dims(w)
        carrier = mx.broadcast_to(mx.array(0, x.dtype), (*x.shape[:-1], n))
        held: Any = hold(*rest[:2], carrier, mx.stop_gradient(x), w)
        return cast(mx.array, whole(held[2], x, w, *held[:2], *rest[2:]))

    return function


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
