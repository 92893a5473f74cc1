"""Products with quantized matrices that each row chooses: checks, path and gradient."""

from __future__ import annotations

from math import prod

import mlx.core as mx

from ..dispatch.measurements import gain, threshold
from ..formats import Format
from ..reference.gather_qmm import gather_qmm as reference
from ..runtime.backend import backend, requested
from ..runtime.legacy import choose
from .gathered import Gathered

_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def gather_qmm(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    *,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    global_scale: mx.array | None = None,
    sorted_indices: bool = False,
) -> mx.array:
    """Multiply blocks of rows with the quantized matrices that indices choose for them.

    Takes the arguments and gives the results of ``mx.gather_qmm``, rounded once from float32
    sums. A mixture of experts is this product: the matrices are the experts.

    Args:
        x: (..., M, K) in float32, float16 or bfloat16.
        w: (..., N, K * bits / 32) uint32, or (..., K, N * bits / 32) if not ``transpose``.
        scales: one a group along the last axis of the matrices; floating point (affine), or uint8
            holding E8M0 (mxfp4, mxfp8) or E4M3 (nvfp4).
        biases: one a group (affine), else None.
        lhs_indices: integers, which block of rows of ``x`` each product takes, counted through
            its leading dimensions. None stands for every block once, in their shape.
        rhs_indices: integers, which matrix each product takes, counted likewise. None stands
            for every matrix once. The two are broadcast. No index may be out of range.
        transpose: multiply with the transposes of the matrices.
        group_size: elements that share a scale; None stands for the mode's default (affine: 64).
        bits: bits an element; None stands for the mode's default (affine: 4).
        mode: ``"affine"``, ``"mxfp4"``, ``"mxfp8"`` or ``"nvfp4"``.
        global_scale: one number for each matrix in mode nvfp4, as ``mx.quantize`` takes it.
        sorted_indices: says that ``rhs_indices`` are sorted, so that products with the same
            matrix can share what they read of it. What is said has to be true.

    Returns:
        (..., M, N) in the dtype of ``x`` (affine: that of ``x`` and ``scales`` promoted), with
        the leading dimensions of the indices.

    Raises:
        ValueError: an argument has a shape, dtype or value that does not fit; it is named.

    Example:
        >>> w, scales, biases = mx.quantize(mx.random.normal((8, 128, 256)))
        >>> chosen = mx.array([[0, 5], [2, 7], [5, 6]])
        >>> gather_qmm(mx.ones((3, 1, 1, 256)), w, scales, biases, rhs_indices=chosen).shape
        (3, 2, 1, 128)

    Source: ``mx.gather_qmm``.
    """
    fmt = Format.checked(group_size, bits, mode)
    leading = _check(x, w, scales, biases, lhs_indices, rhs_indices, transpose, fmt, global_scale)
    empty = 0 in (*leading, *x.shape, *w.shape)
    rows, matrices = prod(leading) * x.shape[-2], prod(w.shape[:-2])
    path = choose(
        "gather_qmm",
        () if empty else ("metal", "cuda", "host"),
        unless="the product is empty"
        if empty
        else _stock_is_better(rows, matrices, sorted_indices)
        or _untested(x.dtype if biases is None else mx.result_type(x, scales), transpose, fmt),
        host_gain=gain(
            "gather_qmm_gain", rows, fmt.mode, fmt.bits, "transposed" if transpose else "plain"
        ),
        arrays=[a for a in (x, w, scales, biases, lhs_indices, rhs_indices) if a is not None],
    )
    right = _indices(rhs_indices, w.shape[:-2], leading)
    if path == "ops":
        left = _indices(lhs_indices, x.shape[:-2], leading)
        return reference(
            x, w, scales, biases, left, right, transpose, fmt, global_scale, sorted_indices
        )
    lists, share = [right], 0
    if lhs_indices is None:
        share = _share(x.shape[:-2], leading)
    if not share:
        lists.append(_indices(lhs_indices, x.shape[:-2], leading))
    numbers = [scales]
    if biases is not None:
        kind = mx.result_type(scales, biases)
        x = x.astype(mx.result_type(x, kind))
        numbers = [scales.astype(kind), biases.astype(kind)]
    if global_scale is not None:
        numbers.append(global_scale.astype(mx.float32))
    products = Gathered(
        path,
        fmt,
        transpose,
        share,
        sorted_indices,
        affine=biases is not None,
        scaled=global_scale is not None,
        back=gather_qmm,
    )
    y = products(x, w, *numbers, *(a.flatten().astype(mx.uint32) for a in lists))
    return y.reshape(*leading, *y.shape[-2:])


def leaves_to_stock(rows: int, matrices: int, in_order: bool) -> bool:
    """Whether ``auto`` runs the stock operator for so many rows, on a GPU.

    For layers: a token takes a product of few rows from each, and checks cost more than it does.
    """
    return requested() == "auto" and _stock_is_better(rows, matrices, in_order) is not None


def _stock_is_better(rows: int, matrices: int, in_order: bool) -> str | None:
    """Why ``auto`` leaves this kernel for the stock operator on a GPU."""
    if backend() == "cuda" and not in_order:
        return "the kernel takes 0.5 to 0.9 times the time of stock, and its call the rest"
    least = threshold("gather_qmm_rows_per_matrix", device="cuda") * matrices
    if backend() == "cuda" and rows < least:
        return "the stock operator and its call are as fast with so few rows for each matrix"
    return {"metal": "the kernel was not measured on an Apple GPU"}.get(backend())


def _untested(dtype: mx.Dtype, transpose: bool, fmt: Format) -> str | None:
    """Why ``auto`` does not trust a kernel that was not held against stock on a GPU."""
    if backend() != "cuda":
        return None
    tested = threshold("gather_qmm_formats", "transposed" if transpose else "plain", device="cuda")
    if dtype == mx.bfloat16 and f"{fmt.mode} {fmt.bits}" in tested:
        return None
    return "the kernel was not tested with this dtype and format on a GPU"


def _indices(
    indices: mx.array | None, shape: tuple[int, ...], leading: tuple[int, ...]
) -> mx.array:
    """As given, or each block of an array once, in the shape of the result."""
    every = mx.arange(prod(shape), dtype=mx.uint32).reshape(shape) if indices is None else indices
    return every if every.shape == leading else mx.broadcast_to(every, leading)


def _share(batch: tuple[int, ...], leading: tuple[int, ...]) -> int:
    """How many neighbouring products take the same block of rows; 0 if it is not so simple."""
    padded = (1,) * (len(leading) - len(batch)) + tuple(batch)
    same = len(leading)
    while same and padded[same - 1] == 1:
        same -= 1
    return prod(leading[same:]) if padded[:same] == leading[:same] else 0


def _check(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    lhs_indices: mx.array | None,
    rhs_indices: mx.array | None,
    transpose: bool,
    fmt: Format,
    global_scale: mx.array | None,
) -> tuple[int, ...]:
    """The leading dimensions of the result."""
    if x.dtype not in _FLOATS:
        raise ValueError(f"x must be float32, float16 or bfloat16, not {x.dtype}")
    if x.ndim < 2 or w.ndim < 2:
        raise ValueError(f"x and w need at least 2 dimensions, not shapes {x.shape} and {w.shape}")
    if problem := fmt.mismatch(w, scales, biases):
        raise ValueError(problem)
    inner = fmt.dims(w) if transpose else w.shape[-2]
    if x.shape[-1] != inner:
        raise ValueError(
            f"x of shape {x.shape} must have {inner} columns to go with w of shape {w.shape} "
            f"(transpose={transpose}, group_size={fmt.group_size}, bits={fmt.bits})"
        )
    for name, indices in (("lhs_indices", lhs_indices), ("rhs_indices", rhs_indices)):
        if indices is not None and not mx.issubdtype(indices.dtype, mx.integer):
            raise ValueError(f"{name} must be integers, not {indices.dtype}")
    if global_scale is not None and (
        problem := fmt.mismatch_of_global(global_scale, prod(w.shape[:-2]))
    ):
        raise ValueError(problem)
    left = x.shape[:-2] if lhs_indices is None else lhs_indices.shape
    right = w.shape[:-2] if rhs_indices is None else rhs_indices.shape
    try:
        return mx.broadcast_shapes(left, right)
    except ValueError:
        raise ValueError(
            f"lhs_indices and rhs_indices do not broadcast: shapes {left} and {right} "
            "(None stands for the leading dimensions of x or w)"
        ) from None
