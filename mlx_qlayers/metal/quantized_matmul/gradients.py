"""Launches the kernels of the gradients of scales and biases."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import mlx.core as mx

from ...formats import Format
from ...runtime.kernel import Kernel
from ...runtime.spec import Spec

_INPUTS = ("left", "right", "w", "left_rows", "right_rows", "offsets", "shape")
_OUTPUTS = ("d_scales", "d_biases")

# Rows and columns of a threadgroup's tile, and its threads.
_ROWS, _COLUMNS, _THREADS = 64, 128, 128
# Sums that a thread keeps where threads do not run side by side.
_SUMS = 256


def _tile_memory(T: mx.Dtype, **_: object) -> int:
    pad = 16 // T.size
    return 64 * (_ROWS + _COLUMNS + 2 * pad)


_TILES = Kernel(
    "quantized_gradients_tiles",
    "quantized_matmul/gradients.metal",
    inputs=_INPUTS,
    outputs=_OUTPUTS,
    template=("T", "S", "group", "bits", "wide", "gathered"),
    max_threads=_THREADS,
    threadgroup_memory=_tile_memory,
    large=True,
)
_GROUPS = Kernel(
    "quantized_gradients_groups",
    "quantized_matmul/gradients.metal",
    inputs=_INPUTS,
    outputs=_OUTPUTS,
    template=("T", "S", "group", "bits", "outputs", "gathered"),
    large=True,
)


def scales_and_biases_gradient(
    x: Spec,
    dy: Spec,
    w: Spec,
    scales: Spec,
    fmt: Format,
    transpose: bool,
    device: str,
    chosen: tuple[Spec, Spec, Spec] | None = None,
) -> Callable[..., list[mx.array]]:
    """The launch of the gradients of scales and biases of affine matrices.

    Args:
        x: (..., K) in float32, float16 or bfloat16, M rows.
        dy: (..., N) in the dtype of ``x``, M rows: the gradient of the products.
        w: (..., N, K * bits / 32) uint32, or (..., K, N * bits / 32) if not ``transpose``.
        scales: (..., N, K / group_size), or (..., K, N / group_size).
        fmt: group_size and bits of ``w``; its mode is affine.
        transpose: whether the product was one with the transpose of ``w``.
        device: ``"metal"``, ``"cuda"`` or ``"host"``.
        chosen: where ``w`` is more than one matrix: rows of ``x`` and rows of ``dy``, by the
            matrix that they met, and where in these lists the rows of each matrix begin; the
            number of all rows comes last. uint32.

    Returns:
        A function of x, dy, w and those of ``chosen`` that gives the gradients of scales and
        biases, in the shape and dtype of ``scales``; float32 sums rounded once, the same in every
        run.
    """
    left, right = (dy, x) if transpose else (x, dy)
    (*leading, rows, _), columns = w.shape, fmt.dims(w)
    matrices = prod(leading)
    shape = mx.array([prod(left.shape[:-1]), rows, columns], mx.int32)
    template: dict[str, mx.Dtype | int | bool] = {
        "T": left.dtype,
        "S": scales.dtype,
        "group": fmt.group_size,
        "bits": fmt.bits,
        "gathered": chosen is not None,
    }
    if device == "host":
        template["outputs"] = outputs = max(1, _SUMS // fmt.group_size)
        kernel = _GROUPS
        tiles = -(-rows // outputs)
        threads = min(tiles, 8)
        grid = (-(-tiles // threads) * threads, columns // fmt.group_size, matrices)
    else:
        template["wide"] = rows % 8 == 0
        kernel, threads = _TILES, _THREADS
        grid = (-(-columns // _COLUMNS) * _THREADS, -(-rows // _ROWS), matrices)
    x_rows, dy_rows, offsets = chosen or (w, w, w)
    launch = kernel.bind(
        [left, right, w, *((dy_rows, x_rows) if transpose else (x_rows, dy_rows)), offsets, shape],
        template=template,
        grid=grid,
        threadgroup=(threads, 1, 1),
        output_shapes=[scales.shape, scales.shape],
    )

    def run(x: mx.array, dy: mx.array, w: mx.array, *chosen: mx.array) -> list[mx.array]:
        x_rows, dy_rows, offsets = chosen or (w, w, w)
        if transpose:
            x, dy, x_rows, dy_rows = dy, x, dy_rows, x_rows
        return launch([x, dy, w, x_rows, dy_rows, offsets, shape])

    return run
