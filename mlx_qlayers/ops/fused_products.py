"""Products of one input with several quantized matrices, and what stands around them, at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..formats import Format
from ..metal.quantized_matmul.dequantize import dequantize
from ..metal.quantized_matmul.qmv import (
    MAX_MATRICES,
    MAX_QMV_ROWS,
    Gate,
    PackedMatrix,
    qmv,
    qmv_config,
    takes_deferred_norm,
)
from ..runtime.backend import backend
from ..runtime.legacy import choose
from ..tuning.lookup import decided, found
from .differentiable import with_gradient_of
from .quantized_matmul import quantized_matmul
from .quantized_paths import DENSE, QMV, dense_is_worse, host_gain, is_few, stock_is_better

Norm = tuple[mx.array | None, float]

_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "silu": nn.silu,
    "gelu": nn.gelu,
    "gelu_approx": nn.gelu_approx,
}


# Where a launch of its own for the norm was measured to be faster than to fold it into the product,
# and whether that of products with a gate.
_NORM_FIRST = (("cuda", False), ("cuda", True))
# Where a norm handed on from product to product makes a token faster. On an H200 the kernels of a
# token of Qwen2-7B's shape took 2.36 ms with launches for the norms, and 2.12 ms that way.
_DEFERS_NORM: tuple[str, ...] = ("cuda",)


def fused_products(
    x: mx.array,
    matrices: Sequence[PackedMatrix],
    *,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    norm: Norm | None = None,
    gate: Gate | None = None,
    residual: mx.array | None = None,
    tile_squares: mx.array | None = None,
    next_weight: mx.array | None = None,
) -> list[mx.array]:
    """Multiply one input with quantized matrices of one format: ``x @ w.T + bias`` for each.

    A kernel does all of it in one launch where the rows are few, rounding the results once; on CUDA
    many rows are one dense product with all of the matrices, unpacked in one launch; else it is
    composed of single operations. The values are theirs up to rounding, the gradient too.

    Args:
        x: (..., K) in float32, float16 or bfloat16.
        matrices: each ``(w, scales, biases, bias)`` as in :func:`quantized_matmul`.
        group_size: elements that share a scale; None stands for the mode's default.
        bits: bits an element; None stands for the mode's default.
        mode: ``"affine"``, ``"mxfp4"``, ``"mxfp8"`` or ``"nvfp4"``.
        norm: weight (K,) or None, and epsilon, of the RMS norm that ``x`` goes through first.
        gate: with two matrices: give ``activation(first) * second`` alone; the activation is
            ``"silu"``, ``"gelu"`` or ``"gelu_approx"``.
        residual: added to the product with a single matrix; not together with ``gate``.
        tile_squares: (M, ceil(K / 16)) float32, with a norm without weight for an ``x`` that was
            multiplied by the weight already: sums of squares of 16 columns of what it was before.
        next_weight: (N,) with a single matrix and no gate: the weight of an RMS norm that the
            result goes through next. What that needs is given too, so that it takes no launch.

    Returns:
        (..., N) for each matrix, or one gated product. With ``next_weight`` also the result times
        it, and ``tile_squares`` of the result.

    Raises:
        ValueError: there is no matrix, ``gate`` does not have two of one shape, ``residual`` does
            not have the shape of a single product, or a matrix does not fit ``x``.

    Example:
        >>> w = [mx.quantize(mx.random.normal((n, 64)), group_size=64, bits=4) for n in (64, 32)]
        >>> [y.shape for y in fused_products(mx.ones((1, 64)), [PackedMatrix(*m) for m in w])]
        [(1, 64), (1, 32)]

    Source:
        ``mx.quantized_matmul``, ``mx.fast.rms_norm``; gated units, arXiv 2002.05202.
    """
    fmt = Format.checked(group_size, bits, mode)
    matrices = [PackedMatrix(*m) for m in matrices]
    _check(x, matrices, fmt, norm, gate, residual)
    _check_deferred_norm(x, matrices, norm, gate, tile_squares, next_weight)
    rows = prod(x.shape[:-1])
    many = rows > MAX_QMV_ROWS
    lacking = _lacking(x, rows, matrices, [norm[0] if norm else None, residual, next_weight])
    by, unless = DENSE if many else QMV, lacking
    if many and not lacking:
        unless = dense_is_worse(rows, sum(m.w.shape[0] for m in matrices), x, fmt)
    elif not lacking:
        n = sum([matrix.w.shape[0] for matrix in matrices])
        handed = tile_squares is not None
        folded = norm is not None and not handed and not _norm_first(backend(), gate)
        kind = _kind(len(matrices), folded, gate is not None, residual is not None)
        best = found("qmv", rows, n, x.shape[-1], x.dtype, fmt, kind)
        by, unless = decided(best, QMV, stock_is_better(x.dtype))
    path = choose(
        "fused_products",
        () if lacking else ("metal", "cuda", "host"),
        unless=unless,
        host_gain=None if lacking or many else host_gain(rows, fmt),
        arrays=(x, matrices[0].w),
        by=by,
    )
    weight, eps = norm or (None, 0.0)
    if path == "ops":
        run: Callable[..., list[mx.array]] = _composed(fmt, norm is not None, eps, gate)
    elif many:
        run = _by_dense_product(fmt, norm is not None, eps, gate)
    else:
        run = _by_kernel(path, fmt, norm is not None, eps, gate)
    return run(x, matrices, weight, residual, tile_squares, next_weight)


def defers_norm(x: mx.array) -> bool:
    """Whether the norms between products of such rows should take no launch, by ``next_weight``.

    Where they take one otherwise. In float16 a number times a weight may be out of range.
    """
    return backend() in _DEFERS_NORM and is_few(x) and x.dtype == mx.bfloat16


def _norm_first(device: str, gate: Gate | None) -> bool:
    return (device, gate is not None) in _NORM_FIRST


@cache
def _kind(matrices: int, norm: bool, gate: bool, residual: bool) -> str:
    """What a launch does besides a product, for the tuner."""
    names = ["norm"] * norm + ["gate"] * gate + ["residual"] * residual
    return "-".join([*names, *[str(matrices)] * (matrices > 1 and not gate)])


@cache
def _composed(fmt: Format, normed: bool, eps: float, gate: Gate | None) -> Callable[..., Any]:
    """The single operations one after the other."""
    size, bits, mode = fmt

    def run(
        x: mx.array,
        matrices: Sequence[Sequence[mx.array]],
        weight: mx.array | None,
        residual: mx.array | None,
        tile_squares: mx.array | None,
        next_weight: mx.array | None,
    ) -> list[mx.array]:
        rows = _normed(x, weight, eps, tile_squares) if normed else x
        products = [
            quantized_matmul(rows, *packed, group_size=size, bits=bits, mode=mode, bias=bias)
            for *packed, bias in matrices
        ]
        if gate is not None:
            products = [_ACTIVATIONS[gate](products[0]) * products[1]]
        if residual is not None:
            products = [residual + products[0]]
        return products if next_weight is None else _with_deferred_norm(products[0], next_weight)

    return run


@cache
def _by_kernel(
    path: str, fmt: Format, normed: bool, eps: float, gate: Gate | None
) -> Callable[..., Any]:
    """The kernel, with the gradient of the single operations."""

    def launch(
        x: mx.array,
        matrices: Sequence[Sequence[mx.array]],
        weight: mx.array | None,
        residual: mx.array | None,
        tile_squares: mx.array | None,
        next_weight: mx.array | None,
    ) -> list[mx.array]:
        packed, k = [PackedMatrix(*m) for m in matrices], x.shape[-1]
        n = sum(m.w.shape[0] for m in packed)
        norm = (weight, eps) if normed else None
        if norm is not None and tile_squares is None and _norm_first(path, gate):
            x, norm = mx.fast.rms_norm(x, weight, eps), None
        folded = norm is not None and tile_squares is None
        kind = _kind(len(packed), folded, gate is not None, residual is not None)
        config = qmv_config(path, x.size // k, n, k, x.dtype, fmt, kind)
        options: dict[str, Any] = {"gate": gate, "residual": residual}
        if takes_deferred_norm(config, packed):
            options |= {"norm": norm, "tile_squares": tile_squares, "next_weight": next_weight}
            return qmv(x, packed, fmt, config, **options)
        if tile_squares is not None:
            x, norm = _normed(x, None, eps, tile_squares), None
        products = qmv(x, packed, fmt, config, norm=norm, **options)
        return products if next_weight is None else _with_deferred_norm(products[0], next_weight)

    return with_gradient_of(_composed(fmt, normed, eps, gate), launch)


@cache
def _by_dense_product(
    fmt: Format, normed: bool, eps: float, gate: Gate | None
) -> Callable[..., Any]:
    """Many rows: the matrices unpacked in one launch, for one dense product."""

    def launch(
        x: mx.array,
        matrices: Sequence[Sequence[mx.array]],
        weight: mx.array | None,
        residual: mx.array | None,
        tile_squares: mx.array | None,
        next_weight: mx.array | None,
    ) -> list[mx.array]:
        packed, (*leading, k) = [PackedMatrix(*m) for m in matrices], x.shape
        rows = (_normed(x, weight, eps, tile_squares) if normed else x).reshape(-1, k)
        dense, sizes = dequantize(packed, fmt, x.dtype), [m.w.shape[0] for m in packed]
        biases, given = [m.bias for m in packed], [m.bias for m in packed if m.bias is not None]
        if residual is not None:
            products = [mx.addmm(residual.reshape(-1, sizes[0]), rows, dense.T)]
        elif len(given) == len(packed):
            whole = given[0] if len(given) == 1 else mx.concatenate(given)
            products, biases = _parts(mx.addmm(whole, rows, dense.T), sizes), []
        else:
            products = _parts(rows @ dense.T, sizes)
        for i, bias in enumerate(biases):
            if bias is not None:
                products[i] += bias
        if gate is not None:
            products = [_ACTIVATIONS[gate](products[0]) * products[1]]
        products = [y.reshape(*leading, -1) for y in products]
        return products if next_weight is None else _with_deferred_norm(products[0], next_weight)

    return with_gradient_of(_composed(fmt, normed, eps, gate), launch)


def _with_deferred_norm(y: mx.array, weight: mx.array) -> list[mx.array]:
    """A result, that times the weight of the norm that follows, and its ``tile_squares``."""
    rows, n = y.astype(mx.float32), y.shape[-1]
    tiles = mx.pad(rows.reshape(-1, n) ** 2, [(0, 0), (0, -n % 16)]).reshape(-1, -(-n // 16), 16)
    return [y, (rows * weight.astype(mx.float32)).astype(y.dtype), tiles.sum(-1)]


def _normed(
    x: mx.array, weight: mx.array | None, eps: float, tile_squares: mx.array | None
) -> mx.array:
    if tile_squares is None:
        return mx.fast.rms_norm(x, weight, eps)
    scale = mx.rsqrt(tile_squares.sum(-1) / x.shape[-1] + eps).reshape(*x.shape[:-1], 1)
    return (x.astype(mx.float32) * scale).astype(x.dtype)


def _parts(y: mx.array, sizes: list[int]) -> list[mx.array]:
    """The columns of each matrix."""
    ends = list(accumulate(sizes))
    return [y[:, end - n : end] for n, end in zip(sizes, ends, strict=True)]


def _lacking(
    x: mx.array,
    rows: int,
    matrices: Sequence[PackedMatrix],
    floats: list[mx.array | None],
) -> str | None:
    """Why no kernel takes these arguments, if none does."""
    if not rows:
        return "there are no rows"
    if rows > MAX_QMV_ROWS and x.dtype == mx.float32 and backend() == "cuda":
        return "MLX multiplies dense float32 matrices in TF32 on CUDA"
    if len(matrices) > MAX_MATRICES:
        return f"{len(matrices)} matrices; the kernel takes 1 to {MAX_MATRICES}"
    if any(m.w.ndim > 2 or 0 in m.w.shape for m in matrices):
        return "the kernel takes matrices that are not empty"
    for _, scales, biases, bias in matrices:
        floats += [biases, bias] if biases is None else [scales, biases, bias]
    dtypes = {a.dtype for a in floats if a is not None} | {x.dtype}
    if len(dtypes) > 1:
        return "the arrays have several floating-point types"
    return None


def _check(
    x: mx.array,
    matrices: Sequence[PackedMatrix],
    fmt: Format,
    norm: Norm | None,
    gate: str | None,
    residual: mx.array | None,
) -> None:
    """Raise for what is wrong with arguments that :func:`quantized_matmul` does not know."""
    if not matrices:
        raise ValueError("matrices must have at least one element")
    for w, scales, biases, bias in matrices:
        if problem := fmt.mismatch(w, scales, biases):
            raise ValueError(f"matrices: {problem}")
        if x.shape[-1] != fmt.dims(w):
            raise ValueError(
                f"x of shape {x.shape} does not go with a matrix of {fmt.dims(w)} columns"
            )
        if bias is not None and bias.shape != w.shape[:1]:
            raise ValueError(f"bias must have shape {w.shape[:1]}, not {bias.shape}")
    shapes = [m.w.shape for m in matrices]
    if norm is not None and norm[0] is not None and norm[0].shape != x.shape[-1:]:
        raise ValueError(f"norm must have a weight of shape {x.shape[-1:]}, not {norm[0].shape}")
    if gate is not None and gate not in _ACTIVATIONS:
        raise ValueError(f"gate must be one of {', '.join(_ACTIVATIONS)}, not {gate!r}")
    if gate is not None and (len(shapes) != 2 or shapes[0] != shapes[1]):
        raise ValueError(f"gate needs two matrices of one shape, not shapes {shapes}")
    if residual is not None:
        shape = (*x.shape[:-1], shapes[0][0])
        if gate is not None or len(shapes) > 1 or residual.shape != shape:
            raise ValueError(
                f"residual must have the shape {shape} of the product with a single matrix, "
                f"not {residual.shape} with gate {gate!r} and {len(shapes)} matrices"
            )


def _check_deferred_norm(
    x: mx.array,
    matrices: Sequence[PackedMatrix],
    norm: Norm | None,
    gate: str | None,
    tile_squares: mx.array | None,
    next_weight: mx.array | None,
) -> None:
    """Raise for what is wrong with the arguments that hand a norm on."""
    if tile_squares is not None:
        shape = (prod(x.shape[:-1]), -(-x.shape[-1] // 16))
        if norm is None or norm[0] is not None:
            raise ValueError("tile_squares needs a norm without weight")
        if tile_squares.shape != shape or tile_squares.dtype != mx.float32:
            raise ValueError(
                f"tile_squares must be float32 {shape}, "
                f"not {tile_squares.dtype} {tile_squares.shape}"
            )
    if next_weight is not None:
        n = matrices[0].w.shape[0]
        if gate is not None or len(matrices) > 1:
            raise ValueError("next_weight needs a single matrix and no gate")
        if next_weight.shape != (n,):
            raise ValueError(f"next_weight must have shape ({n},), not {next_weight.shape}")
