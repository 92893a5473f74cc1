"""The route of a product with a quantized matrix: which kernel, or the reference, and why."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx

from ..dispatch import Choice, choose
from ..formats import Format
from ..metal.quantized_matmul.dequantize import dequantize
from ..metal.quantized_matmul.qmm import WAVE, qmm, qmm_config
from ..metal.quantized_matmul.qmv import (
    MAX_QMV_ROWS,
    PackedMatrix,
    qmv_config,
    single_qmv,
)
from ..metal.quantized_matmul.qvm import qvm, qvm_config
from ..reference import quantized_matmul as reference
from ..runtime.backend import backend
from ..runtime.spec import Spec
from ..tuning.lookup import decided, found

# How many times as fast as the reference the host kernel is, for 1, 2, 4, 8 and 16 rows; measured
# by `benchmarks/bench_quantized_matmul.py --host`.
_HOST_GAIN = {
    ("affine", 1): (5.7, 9.4, 14.3, 15.5, 13.4),
    ("affine", 2): (4.7, 7.8, 11.6, 15.2, 11.6),
    ("affine", 3): (3.9, 6.1, 9.4, 13.4, 15.3),
    ("affine", 4): (4.4, 7.2, 11.1, 14.6, 10.5),
    ("affine", 5): (4.2, 6.1, 9.8, 13.7, 15.6),
    ("affine", 6): (3.5, 6.0, 9.3, 13.1, 15.3),
    ("affine", 8): (4.9, 7.7, 11.4, 14.7, 9.9),
    ("mxfp4", 4): (0.9, 1.5, 2.3, 3.6, 4.4),
    ("mxfp8", 8): (4.5, 7.8, 9.9, 9.1, 7.6),
    ("nvfp4", 4): (0.8, 1.1, 2.0, 2.8, 3.0),
}

# The least of untransposed products in 2, 4, 5 and 8 bits and small floats, 1 to 1,024 rows.
_HOST_GAIN_UNTRANSPOSED = 1.4

# Rows up to which tiles are faster than unpacking the matrix for a dense product on an H200, and
# the same of tiles that share the depth.
_TILES_UNTIL, _PARTS_UNTIL = 128, 64
# Elements, once for each 64 rows, below which the stock operator takes no longer there than our
# two launches. In float32 it takes six times as long for each.
_SMALL, _SMALL_IN_FLOAT32 = 44 << 20, 4 << 20

# Picoseconds that the stock operator takes on an H200 for each element of a matrix, for 1 to 8 rows
# (from there on no more), and what a call of the kernel takes there before another can follow.
_STOCK_ON_CUDA = (0.57, 1.13, 1.7, 2.2, 2.8, 3.3, 3.9, 0.43)
_CALL_ON_CUDA = 20e6

QMV, QVM, QMM, DENSE = "qmv", "qvm", "qmm", "dequantize and matmul"

# A product of x, w, scales, biases and bias; the last two may be None.
Product = Callable[..., mx.array]


class Route(NamedTuple):
    """How one product is computed.

    Attributes:
        choice: the backend of the kernels or ``"ops"``, and why.
        kernel: which of them.
    """

    choice: Choice
    kernel: str = ""


def is_qmv(x: Spec | mx.array) -> bool:
    """Whether an input has so few rows that qmv takes it."""
    return x.ndim > 1 and 0 < x.size <= MAX_QMV_ROWS * x.shape[-1]


def is_dense(x: Spec | mx.array) -> bool:
    """Whether an input has so many rows that several matrices are dequantized for it at once."""
    if x.dtype == mx.float32 or backend() != "cuda":
        return False
    return x.ndim > 1 and x.size > _TILES_UNTIL * x.shape[-1] > 0


def route(op: str, x: Spec, w: Spec, transpose: bool, fmt: Format, single: bool = False) -> Route:
    """Choose how to compute ``x @ w.T``, or ``x @ w``.

    Args:
        op: the operation's name.
        x: (..., K) in the dtype of the result.
        w: (N, K * bits / 32) uint32, or (K, N * bits / 32) if not ``transpose``.
        transpose: multiply with the transpose of the packed matrix.
        fmt: group_size, bits and mode of ``w``.
        single: whether Python calls the product each time, which may take longer than it runs.

    Raises:
        BackendError: a backend was forced that has no kernel for these arguments.
    """
    rows = prod(x.shape[:-1])
    if w.ndim > 2 or 0 in (rows, *w.shape):
        return Route(choose(op, (), unless="the kernels take one matrix, and nothing empty"))
    device = backend()
    vector = QMV if transpose else QVM
    if device == "host":
        # Where threads do not run side by side, sixteen rows after sixteen are fastest.
        kernel, unless = vector, None
    elif rows <= MAX_QMV_ROWS and transpose:
        kernel, unless = QMV, stock_is_better(x.dtype)
    elif device == "cuda":
        kernel, unless = _many_rows_on_cuda(rows, x, w, transpose, fmt)
    else:
        kernel, unless = QMM, "the kernel was not measured on an Apple GPU"
    kernel, unless, by = _tuned(rows, x, w, transpose, fmt, kernel, unless)
    if single and kernel == QMV and device == "cuda":
        unless = unless or _call_is_too_long(rows, w, fmt)
    gain = host_gain(rows, fmt, transpose)
    return Route(choose(op, unless=unless, host_gain=gain, by=by), kernel)


def _tuned(
    rows: int,
    x: Spec,
    w: Spec,
    transpose: bool,
    fmt: Format,
    kernel: str,
    unless: str | None,
) -> tuple[str, str | None, str]:
    """The kernel, why it is left, and its name in reasons, after what tuning found here."""
    n, k = w.shape[0] if transpose else fmt.dims(w), x.shape[-1]
    if rows <= MAX_QMV_ROWS and transpose:
        best = found("qmv", rows, n, k, x.dtype, fmt)
    else:
        best = found("qmm", rows, n, k, x.dtype, fmt, transpose)
    if best is not None and best.path == "dequantized":
        return DENSE, None, f"{DENSE}, as tuned here"
    by, unless = decided(best, kernel, unless)
    return kernel, unless, by


def stock_is_better(dtype: mx.Dtype) -> str | None:
    """Why ``auto`` leaves qmv for the stock operator on a GPU."""
    if backend() == "cuda":
        if dtype == mx.float32:
            return "the stock operator is faster in float32, which the matrix units do not take"
        return None
    return {"metal": "the kernel was not measured on an Apple GPU"}.get(backend())


def _call_is_too_long(rows: int, w: Spec, fmt: Format) -> str | None:
    """Why ``auto`` leaves a single product to the stock operator on an H200."""
    stock = _STOCK_ON_CUDA[min(rows, 8) - 1] * w.size * 32 / fmt.bits
    if stock > _CALL_ON_CUDA:
        return None
    return "the stock operator takes less time than Python to call the kernel"


def host_gain(rows: int, fmt: Format, transpose: bool = True) -> float:
    """The gain of the kernels of few rows at the next smaller number of rows that was measured."""
    if not transpose:
        return _HOST_GAIN_UNTRANSPOSED
    return _HOST_GAIN[fmt.mode, fmt.bits][min(rows, MAX_QMV_ROWS).bit_length() - 1]


def _many_rows_on_cuda(
    rows: int, x: Spec, w: Spec, transpose: bool, fmt: Format
) -> tuple[str, str | None]:
    """The kernel, and why ``auto`` leaves it for the stock operator; measured on an H200.

    The dense matrix is held in memory while it is multiplied: 2 bytes an element.
    """
    n, k = w.shape[0] if transpose else fmt.dims(w), x.shape[-1]
    cut = qmm_config("cuda", rows, n, k, x.dtype, fmt, transpose)
    # Where tiles share the depth and another launch adds them up, a dense product wins sooner.
    until = _TILES_UNTIL if cut.count(rows, n) >= WAVE else _PARTS_UNTIL
    # MLX multiplies dense float32 matrices in TF32, which the kernels must not be.
    kernel = QMM if x.dtype == mx.float32 or rows <= until else DENSE
    if fmt.mode == "affine" and fmt.bits == 1:
        return kernel, None  # there is no stock operator
    return kernel, _too_small(rows, n * k, x.dtype)


def _too_small(rows: int, elements: int, dtype: mx.Dtype) -> str | None:
    """Why ``auto`` leaves many rows times so few elements to the stock operator on CUDA."""
    least = _SMALL_IN_FLOAT32 if dtype == mx.float32 else _SMALL
    if -(-rows // 64) * elements >= least:
        return None
    return "the stock operator is faster with so small a matrix and so few rows"


def dense_is_worse(rows: int, n: int, x: Spec, fmt: Format) -> str | None:
    """Why ``auto`` does not unpack several matrices, of n rows in all, for one dense product."""
    best = found("qmm", rows, n, x.shape[-1], x.dtype, fmt, True)
    if best is not None and best.path != "modelled":
        what = QMM if best.path == "kernel" else best.path
        return None if best.path == "dequantized" else f"{what}: faster when tuned here"
    if backend() != "cuda":
        return "a dense product of many rows was measured on CUDA alone"
    if rows <= _TILES_UNTIL:
        return "qmm is faster for so few rows"
    return _too_small(rows, n * x.shape[-1], x.dtype)


def product(to: Route, x: Spec, matrix: PackedMatrix, transpose: bool, fmt: Format) -> Product:
    """The launch of ``x @ w.T + bias``, or ``x @ w + bias``, on a route that takes these arguments.

    Args:
        to: from :func:`route`.
        x: (..., K); on a kernel's path in the dtype of the result.
        matrix: specs of ``w`` (N, K * bits / 32), or (K, N * bits / 32) if not ``transpose``, of
            its scales, biases and bias.
        transpose: multiply with the transpose of the packed matrix.
        fmt: group_size, bits and mode of ``w``.

    Returns:
        A function of x, w, scales, biases and bias that gives (..., N); further arguments are not
        looked at.
    """
    path = to.choice.path
    if path == "ops":
        return by_reference(transpose, fmt)
    rows, k = prod(x.shape[:-1]), x.shape[-1]
    n = matrix.w.shape[0] if transpose else fmt.dims(matrix.w)
    if to.kernel in (QMV, QVM):
        if rows > MAX_QMV_ROWS:
            return _in_blocks(to, x, matrix, transpose, fmt)
        if to.kernel == QVM:
            return qvm(x, matrix, fmt, qvm_config(path, rows, n, k, fmt))
        return single_qmv(x, matrix, fmt, qmv_config(path, rows, n, k, x.dtype, fmt))
    if to.kernel == QMM:
        config = qmm_config(path, rows, n, k, x.dtype, fmt, transpose)
        return qmm(x, matrix, transpose, fmt, config)
    unpack = dequantize([matrix], fmt, x.dtype)

    def dense_product(x: mx.array, *given: mx.array | None) -> mx.array:
        *packed, bias = given[:4]
        dense = unpack(*(a for a in packed if a is not None))
        dense = dense.T if transpose else dense
        return x @ dense if bias is None else mx.addmm(bias, x, dense)

    return dense_product


def by_reference(transpose: bool, fmt: Format) -> Product:
    """The product in MLX's operators."""

    def run(x: mx.array, w: mx.array, scales: mx.array, *rest: Any) -> mx.array:
        biases, bias, *_ = *rest, None
        y = reference.quantized_matmul(x, w, scales, biases, transpose, fmt)
        return y if bias is None else y + bias

    return run


def _in_blocks(
    to: Route,
    x: Spec,
    matrix: PackedMatrix,
    transpose: bool,
    fmt: Format,
) -> Product:
    """The product of as many rows at a time as the kernel takes."""
    rows, k = prod(x.shape[:-1]), x.shape[-1]
    starts = range(0, rows, MAX_QMV_ROWS)
    launches = {
        size: product(to, Spec((size, k), x.dtype), matrix, transpose, fmt)
        for size in {min(MAX_QMV_ROWS, rows - i) for i in starts}
    }

    def run(x: mx.array, *matrix: mx.array | None) -> mx.array:
        flat = x.reshape(-1, k)
        blocks = [flat[i : i + MAX_QMV_ROWS] for i in starts]
        products = [launches[len(block)](block, *matrix) for block in blocks]
        return mx.concatenate(products).reshape(*x.shape[:-1], -1)

    return run
