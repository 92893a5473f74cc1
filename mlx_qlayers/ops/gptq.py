"""Weights quantized column by column, each error passed on to the columns behind it (GPTQ)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ..dispatch import Operation, Plan, choose, dispatch
from ..formats import Format
from ..metal.gptq import launch
from ..metal.gptq.launch import BLOCK
from ..reference import gptq as reference
from ..runtime.spec import Spec
from .linalg import cholesky, solve_triangular, subtract_product
from .signature import Signature

# How often a Hessian that is not positive definite in float32 is damped tenfold.
_RETRIES = 3


def gptq(
    w: mx.array, hessian: mx.array, fmt: Format, *, act_order: bool = False, damping: float = 0.01
) -> tuple[mx.array, mx.array, mx.array]:
    """Quantize matrices so that their products with the inputs seen change least.

    Args:
        w: (..., N, K) float32, float16 or bfloat16; scales and biases get its dtype.
        hessian: (..., K, K) float32, the sum of x^T x over inputs x (1, K).
        fmt: an affine format.
        act_order: take the columns with the largest inputs first, with scales chosen beforehand.
        damping: the share of the mean of the diagonal that is added to it.

    Returns:
        Packed weights, scales and biases, as ``mx.quantize`` gives them.

    Raises:
        ValueError: the format is not affine, or a shape, dtype or number does not fit; it is named.

    Example:
        >>> w, x = mx.random.normal((16, 128)), mx.random.normal((512, 128))
        >>> packed, scales, biases = gptq(w, x.T @ x, Format(64, 4))
        >>> packed.shape, scales.shape
        ((16, 16), (16, 2))

    Source: Frantar et al., 2023, https://arxiv.org/abs/2210.17323.
    """
    _TAKES.check(w, hessian, act_order, damping)
    fmt, (*lead, n, k) = Format.checked(*fmt), w.shape
    if fmt.mode != "affine" or k % fmt.group_size:
        raise ValueError(f"{fmt} cannot hold rows of {k}: affine, in whole groups")
    flat = w.reshape(-1, n, k).astype(mx.float32)
    h = hessian.reshape(-1, k, k)
    diagonal = mx.diagonal(h, axis1=1, axis2=2)
    unseen = diagonal == 0
    flat = mx.where(unseen[:, None], 0, flat)
    order = mx.argsort(-diagonal, axis=1) if act_order else None
    if order is not None:
        h = mx.take_along_axis(h, order[:, :, None], axis=1)
        h = mx.take_along_axis(h, order[:, None], axis=2)
    u = _inverse_factor(h, float(damping))
    if order is None:
        codes, scales, biases = _in_order(flat, u, fmt, w.dtype)
    else:
        codes, scales, biases = _by_size(flat, u, fmt, w.dtype, order, diagonal)
    found = (pack(codes, fmt.bits), scales, biases)
    return tuple(x.reshape(*lead, n, -1) for x in found)  # type: ignore[return-value]


def nearest(w: mx.array, fmt: Format) -> tuple[mx.array, mx.array, mx.array]:
    """Round weights to the nearest, each group in the range that leaves the least squared error.

    Args:
        w: (..., N, K), of which scales and biases get the dtype.
        fmt: an affine format.

    Returns:
        Packed weights, scales and biases, as ``mx.quantize`` gives them.

    Example:
        >>> packed, scales, biases = nearest(mx.random.normal((16, 128)), Format(64, 4))
        >>> packed.shape, scales.shape
        ((16, 16), (16, 2))
    """
    groups = w.astype(mx.float32).reshape(*w.shape[:-1], -1, fmt.group_size)
    scales, biases = reference.fit(groups, mx.array(1.0), fmt.bits, w.dtype)
    steps, starts = (x.astype(mx.float32)[..., None] for x in (scales, biases))
    codes = mx.clip(mx.round((groups - starts) / steps), 0, 2**fmt.bits - 1)
    return pack(codes.reshape(w.shape), fmt.bits), scales, biases


def _inverse_factor(h: mx.array, damping: float) -> mx.array:
    """U of H^-1 = U^T U: the inverse of R, where H = R R^T backwards; padded to whole blocks."""
    k = h.shape[-1]
    mean = mx.diagonal(h, axis1=1, axis2=2).mean(axis=1)[:, None, None]
    mean = mx.where(mean > 0, mean, 1)
    for attempt in range(_RETRIES + 1):
        damped = h + damping * 10**attempt * mean * mx.eye(k)
        try:
            lower = cholesky(damped[:, ::-1, ::-1])
            break
        except ValueError:
            if attempt == _RETRIES:
                raise
    u = solve_triangular(lower[:, ::-1, ::-1], mx.eye(k), upper=True)
    pad = -k % BLOCK
    if not pad:
        return u
    corner = mx.broadcast_to(mx.eye(pad), (h.shape[0], pad, pad))
    right = mx.concatenate([mx.zeros((h.shape[0], k, pad)), corner], axis=1)
    return mx.concatenate([mx.pad(u, [(0, 0), (0, pad), (0, 0)]), right], axis=2)


def _in_order(
    w: mx.array, u: mx.array, fmt: Format, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array]:
    """Columns as they come; the scales of a group are chosen when its turn comes."""
    k = w.shape[-1]

    def quantize(block: mx.array, diagonal: mx.array, _: int) -> list[mx.array]:
        return dispatch(_BLOCK, (block, diagonal), (fmt.group_size, fmt.bits, dtype))

    codes, scales, biases = _columns(w, u, quantize)
    groups = k // fmt.group_size
    return codes[..., :k], scales[..., :groups], biases[..., :groups]


def _by_size(
    w: mx.array, u: mx.array, fmt: Format, dtype: mx.Dtype, order: mx.array, diagonal: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Columns in an order, with the scales that fit the weights before any was quantized."""
    k = w.shape[-1]
    groups = w.reshape(*w.shape[:-1], -1, fmt.group_size)
    seen = mx.maximum(diagonal, 1e-6 * diagonal.max(axis=1, keepdims=True) + 1e-30)
    importance = seen.reshape(len(w), 1, -1, fmt.group_size)
    scales, biases = reference.fit(groups, importance, fmt.bits, dtype)

    def of_columns(x: mx.array) -> mx.array:
        wide = mx.repeat(x.astype(mx.float32), fmt.group_size, axis=-1)
        return _padded(mx.take_along_axis(wide, order[:, None], axis=2), 1.0)

    wide = of_columns(scales), of_columns(biases)

    def quantize(block: mx.array, diagonal: mx.array, first: int) -> list[mx.array]:
        fixed = [x[..., first : first + BLOCK] for x in wide]
        return dispatch(_FIXED, (block, diagonal, *fixed), (fmt.bits,))

    (codes,) = _columns(mx.take_along_axis(w, order[:, None], axis=2), u, quantize)
    back = mx.argsort(order, axis=1)[:, None]
    return mx.take_along_axis(codes[..., :k], back, axis=2), scales, biases


def _columns(w: mx.array, u: mx.array, quantize: Any) -> list[mx.array]:
    """Block after block, and the errors of each taken off all behind it by one product."""
    w, done = _padded(w, 0.0), []
    for first in range(0, u.shape[-1], BLOCK):
        end = first + BLOCK
        codes, errors, *rest = quantize(w[..., :BLOCK], u[:, first:end, first:end], first)
        done.append([codes, *rest])
        w = w[..., BLOCK:]
        if w.size:
            w = subtract_product(w, errors, u[:, first:end, end:])
        mx.async_eval(w, done[-1])
    return [mx.concatenate([*parts], axis=-1) for parts in zip(*done, strict=True)]


def _padded(x: mx.array, value: float) -> mx.array:
    return mx.pad(x, [(0, 0), (0, 0), (0, -x.shape[-1] % BLOCK)], constant_values=value)


def pack(codes: mx.array, bits: int) -> mx.array:
    """Codes (..., K) in words of 32 bits (..., K * bits / 32), the first in the lowest bits.

    Args:
        codes: whole numbers below ``2**bits``; K is a multiple of 32.
        bits: 1 to 8.

    Raises:
        ValueError: K is not a multiple of 32.

    Example:
        >>> pack(mx.arange(32) % 2, 1)
        array([2863311530], dtype=uint32)
    """
    if codes.shape[-1] % 32:
        raise ValueError(f"codes of shape {codes.shape} must have a multiple of 32 columns")
    turns = codes.reshape(*codes.shape[:-1], -1, 32).astype(mx.uint32)
    words = []
    for word in range(bits):
        total = mx.zeros(turns.shape[:-1], mx.uint32)
        for i in range(32 * word // bits, min(32, -(-32 * (word + 1) // bits))):
            shift = i * bits - 32 * word
            part = turns[..., i]
            total = total | (part << shift if shift >= 0 else part >> -shift)
        words.append(total)
    return mx.stack(words, axis=-1).reshape(*codes.shape[:-1], -1)


def _plan(composed: Any, bind: Any, arrays: Sequence[Spec], *options: Any) -> Plan:
    choice = choose("gptq")

    def run(*given: mx.array) -> list[mx.array]:
        found: list[mx.array] = composed(*given, *options)
        return found

    launch = run if choice.path == "reference" else bind(arrays[0], *options)
    return Plan(choice, launch, (), run)


def _sample(arrays: list[mx.array], *static: Any) -> list[mx.array]:
    """A factor with a diagonal of ones, and ranges that hold the weights."""
    w, u, *ranges = arrays
    factor = mx.triu(u / (4 * u.shape[-1]), 1) + mx.eye(u.shape[-1])
    return [w, factor, *(0.5 + mx.abs(each) if i == 0 else each for i, each in enumerate(ranges))]


_TAKES = Signature("""
    w: float (*L, N, K)
    hessian: float32 (*L, K, K)
    act_order: flag
    damping: number >= 0
""")
_OF_BLOCK = partial(_plan, reference.gptq_block, launch.gptq_block)
_OF_FIXED = partial(_plan, reference.gptq_fixed_block, launch.gptq_fixed_block)
_BLOCK = Operation("gptq_block", _OF_BLOCK, sample=_sample)
_FIXED = Operation("gptq_fixed_block", _OF_FIXED, sample=_sample)
