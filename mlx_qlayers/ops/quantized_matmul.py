"""Product with a quantized matrix: checks, route and gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import mlx.core as mx

from ..dispatch import Arrays, Gradient, Operation, Plan, choose, dispatch
from ..dispatch.choice import unmeasured
from ..formats import GLOBAL_UNIT, Format
from ..measurements.thresholds import Measured, threshold
from ..metal.quantized_matmul.gradients import scales_and_biases_gradient
from ..options import MatmulCall, PackedMatrix
from ..runtime.backend import current, requested
from ..runtime.spec import Spec
from .quantized_route import by_reference, product, route
from .signature import Signature, check_packed


def quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
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
        mode: one of ``mx.quantize``, as ``"affine"`` or ``"mxfp4"``.
        bias: (N,) added to every row of the product.
        global_scale: one number for the matrix in mode nvfp4, as ``mx.quantize`` takes it. The
            stock operator has no such argument; it is applied to the float32 sums.

    Returns:
        (..., N) in the dtype of ``x`` (affine: that of ``x`` and ``scales`` promoted).

    Raises:
        ValueError: an argument has a shape, dtype or value that does not fit; it is named.

    Example:
        >>> weight = mx.random.normal((128, 256))
        >>> w, scales, biases = mx.quantize(weight, group_size=64, bits=8)
        >>> quantized_matmul(mx.ones((3, 256)), w, scales, biases, group_size=64, bits=8).shape
        (3, 128)
        >>> w, scales = mx.quantize(weight, mode="mxfp4")
        >>> quantized_matmul(mx.ones((3, 256)), w, scales, mode="mxfp4").shape
        (3, 128)

    Source: ``mx.quantized_matmul``.
    """
    arrays = x, w, scales, biases, bias, global_scale
    return dispatch(QUANTIZED_MATMUL, arrays, (transpose, group_size, bits, mode))


def _plan(
    arrays: Sequence[Any], transpose: bool, group_size: int | None, bits: int | None, mode: str
) -> Plan:
    x, w, scales, biases, bias, global_scale = arrays
    fmt, transpose = Format.checked(group_size, bits, mode), bool(transpose)
    _check(arrays, transpose, fmt)
    static = transpose, *fmt
    if global_scale is not None:
        if problem := fmt.mismatch_of_global(global_scale, 1):
            raise ValueError(problem)
        return Plan(None, _with_global_scale(static, Spec(x.shape, x.dtype)))
    if x.ndim == 1 and requested() != "reference":  # of which MLX has no product on NVIDIA GPUs

        def run(x: mx.array, *rest: mx.array | None) -> Any:
            return dispatch(QUANTIZED_MATMUL, (x[None], *rest), static)[0]

        return Plan(None, run)
    call = MatmulCall(x, PackedMatrix(w, scales, biases, bias), transpose, fmt)
    to = route("quantized_matmul", call, current.get().mode.single)
    composed = by_reference(transpose, fmt)
    if requested() == "reference" or w.ndim > 2:
        return Plan(to.choice, composed)
    out = x.dtype if biases is None else mx.result_type(x.dtype, scales.dtype, biases.dtype)
    pair = None if biases is None else mx.result_type(scales.dtype, biases.dtype)
    as_they_are = (x.dtype, bias and bias.dtype, biases and scales.dtype, biases and biases.dtype)
    if as_they_are != (out, bias and out, pair, pair):
        return Plan(None, _with_casts(static, out, pair))
    gradients = _gradients(transpose, fmt, biases is not None, bias is not None)
    return Plan(to.choice, product(to, call), gradients, composed)


def _with_global_scale(static: tuple[Any, ...], rows: Spec) -> Callable[..., mx.array]:
    """In float32, times the global scale, plus the bias."""

    def run(
        x: mx.array, w: mx.array, scales: mx.array, biases: None, bias: Any, global_scale: mx.array
    ) -> mx.array:
        arrays = x.astype(mx.float32), w, scales, None, None, None
        y: mx.array = dispatch(QUANTIZED_MATMUL, arrays, static)
        y = y * (global_scale.reshape(()).astype(mx.float32) / GLOBAL_UNIT)
        if bias is None:
            return y.astype(rows.dtype)
        return (y + bias).astype(mx.result_type(x, bias))

    return run


def _with_casts(
    static: tuple[Any, ...], out: mx.Dtype, pair: mx.Dtype | None
) -> Callable[..., mx.array]:
    """In the dtypes that MLX promotes to; a bias of more precision is added afterwards, as in stock
    layers.
    """

    def run(x: mx.array, w: mx.array, scales: Any, biases: Any, bias: Any, _: None) -> mx.array:
        if biases is not None:
            scales, biases = scales.astype(pair), biases.astype(pair)
        fused = bias if bias is not None and bias.dtype == out else None
        arrays = x.astype(out), w, scales, biases, fused, None
        y: mx.array = dispatch(QUANTIZED_MATMUL, arrays, static)
        return y if bias is fused else y + bias

    return run


def _gradients(transpose: bool, fmt: Format, affine: bool, biased: bool) -> list[Gradient]:
    """Those of x, of scales and biases together, and of the bias."""

    def of_x(arrays: Arrays, cotangents: list[mx.array], _: object) -> list[mx.array]:
        return [dispatch(_GRADIENT_OF_X, (*cotangents, *arrays[1:4]), (not transpose, fmt))]

    def of_scales_and_biases(
        arrays: Arrays, cotangents: list[mx.array], _: object
    ) -> list[mx.array]:
        x, *packed = arrays[:4]
        given = x, *cotangents, *packed
        return dispatch(SCALES_AND_BIASES_GRADIENT, given, (transpose, fmt))

    def of_bias(_: Arrays, cotangents: list[mx.array], __: object) -> list[mx.array]:
        (dy,) = cotangents
        return [dy.reshape(-1, dy.shape[-1]).astype(mx.float32).sum(0).astype(dy.dtype)]

    gradients = [Gradient((0,), of_x)]
    gradients += [Gradient((2, 3), of_scales_and_biases)] * affine
    return gradients + [Gradient((4,), of_bias)] * biased


def _plan_gradient_of_x(arrays: Sequence[Any], transpose: bool, fmt: Format) -> Plan:
    dy, w, scales, biases = arrays
    call = MatmulCall(dy, PackedMatrix(w, scales, biases), transpose, fmt)
    to = route("quantized_matmul, gradient of x", call)
    launch = product(to, call)
    return Plan(to.choice, lambda *given: launch(*given, None), (), by_reference(transpose, fmt))


def _plan_scales_and_biases(arrays: Sequence[Any], transpose: bool, fmt: Format) -> Plan:
    """The gradients of scales and biases of an affine product.

    Its arrays are x (..., K), dy (..., N) in the dtype of ``x``, w, scales and biases. The kernel
    holds neither the dense matrix nor its gradient in memory.
    """
    x, dy, w, scales, biases = arrays
    rows = prod(x.shape[:-1])
    whole = w.ndim == 2 and 0 not in (*w.shape, rows)
    lacking = None if whole else "the kernel takes one product, not empty"
    reason = lacking or unmeasured()
    # In float32 the stock operators multiply in TF32, which is not exact enough.
    most = None if x.dtype == mx.float32 else threshold("scales_gradient_max_rows")
    if reason is None and most is not None:
        why = "the stock operators, which hold the dense gradient, are faster with so many rows"
        reason = Measured(why if rows > most else "")
    choice = choose(
        "quantized_matmul, gradient of scales and biases",
        not lacking,
        reason=reason,
        host_gain=threshold("scales_gradient_gain", device="host"),
    )
    reference = by_reference(transpose, fmt)

    def composed(x: mx.array, dy: mx.array, w: mx.array, *packed: mx.array) -> list[mx.array]:
        def product(s: mx.array, b: mx.array) -> mx.array:
            return reference(x, w, s, b)

        return mx.vjp(product, list(packed), [dy])[1]

    if choice.path == "reference":
        return Plan(choice, composed)
    call = MatmulCall(x, PackedMatrix(w, scales, biases), transpose, fmt)
    launch = scales_and_biases_gradient(call, dy, choice.path)
    return Plan(choice, lambda *given: launch(*given[:3]), (), composed)


_TAKES = Signature("""
    x: float (..., K)
    w: uint32 (..., N, W)
""")
_BIAS = Signature("bias: any (N,) or None")


def _rows_alone(arrays: Sequence[Any], axes: Sequence[int | None]) -> bool:
    """Whether ``mx.vmap`` gives one matrix more rows."""
    return arrays[1].ndim == 2 and not any(axis is not None for axis in axes[1:])


QUANTIZED_MATMUL = Operation("quantized_matmul", _plan, compiled=True, batched=_rows_alone)
_GRADIENT_OF_X = Operation("quantized_matmul, gradient of x", _plan_gradient_of_x)
SCALES_AND_BIASES_GRADIENT = Operation(
    "quantized_matmul, gradient of scales and biases", _plan_scales_and_biases
)


def _check(arrays: Sequence[Any], transpose: bool, fmt: Format) -> None:
    x, w, scales, biases, bias, _ = arrays
    _TAKES.check(x, w)
    check_packed(x, w, scales, biases, transpose, fmt)
    _BIAS.check(bias, N=w.shape[-2] if transpose else fmt.dims(w))
