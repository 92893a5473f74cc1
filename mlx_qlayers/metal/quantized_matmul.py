"""Launches the kernels that multiply with a quantized matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..formats import MODES, Format
from ..runtime.kernel import Kernel

MAX_FEW_ROWS = 16
MAX_MATRICES = 3

Gate = Literal["silu", "gelu", "gelu_approx"]


class PackedMatrix(NamedTuple):
    """A quantized matrix that rows are multiplied with, and what is added to the product.

    Attributes:
        w: (N, K * bits / 32) uint32.
        scales: (N, K / group_size), floating point (affine) or uint8.
        biases: as ``scales`` (affine), else None.
        bias: (N,) in the dtype of the rows, or None.
    """

    w: mx.array
    scales: mx.array
    biases: mx.array | None = None
    bias: mx.array | None = None


_FEW_ROWS = Kernel(
    "quantized_matmul_few_rows",
    "quantized_matmul.metal",
    inputs=("x", "w", "scales", "biases", "bias", "shape"),
    outputs=("y",),
    template=(
        "T",
        "S",
        "mode",
        "group",
        "bits",
        "rows",
        "outputs",
        "run",
        "lanes",
        "ways",
        "biased",
    ),
    large=True,
)


@dataclass(frozen=True)
class FewRows:
    """How a product of few rows is spread over threads.

    Attributes:
        rows: rows that the kernel is compiled for; a product may have fewer.
        outputs: columns of the result that one SIMD group, or one thread, computes.
        run: neighbouring elements of a row of the matrix that a thread takes at once; a multiple
            of 16, or of 32 where ``bits`` is odd, that divides the group size.
        lanes: threads that share the columns: 32, or 1 where threads do not run side by side.
        ways: float32 sums that a thread keeps for each output; divides ``run``.
        threads: threads of a threadgroup; a multiple of ``lanes``.
    """

    rows: int
    outputs: int
    run: int
    lanes: int
    ways: int
    threads: int


@cache
def few_rows(device: str, rows: int, n: int, k: int, dtype: mx.Dtype, fmt: Format) -> FewRows:
    """The configuration for a backend.

    Args:
        device: ``"metal"``, ``"cuda"`` or ``"host"``.
        rows: rows of the product, 1 to 16.
        n: outputs of a row, those of all matrices.
        k: elements of a row.
        dtype: of the rows.
        fmt: the format of the matrix.
    """
    if device == "host":
        # A thread is a loop of vector instructions: 16 floats fill the widest registers there are.
        # Its loops over rows are not unrolled, so that one kernel does for all but the single row.
        rows = 1 if rows == 1 else MAX_FEW_ROWS
        return FewRows(rows, outputs=4, run=fmt.group_size, lanes=1, ways=16, threads=8)
    # The sums and unpacked weights must stay within some 100 registers.
    run = 32 if fmt.bits % 2 else 16
    rows = next(n for n in (1, 2, 4, 8, MAX_FEW_ROWS) if n >= rows)
    outputs = 4 if rows * run <= 64 else 2
    return FewRows(rows, outputs, run, lanes=32, ways=1, threads=64)


def products_of_few_rows(
    x: mx.array,
    matrices: Sequence[PackedMatrix],
    fmt: Format,
    config: FewRows,
    *,
    norm: tuple[mx.array | None, float] | None = None,
    gate: Gate | None = None,
    residual: mx.array | None = None,
) -> list[mx.array]:
    """``x @ w.T + bias`` for up to three matrices of one format, each read once for all rows.

    Args:
        x: (..., K) in float32, float16 or bfloat16; M rows, 1 to 16.
        matrices: of K columns each, biases all or none, bias each as it likes.
        fmt: group_size, bits and mode of the matrices.
        config: how to spread the work.
        norm: weight (K,) in the dtype of ``x`` or None, and epsilon, of the RMS norm that ``x``
            goes through first; None for no norm.
        gate: with two matrices of one shape, give ``activation(first) * second`` alone.
        residual: added to the product of a single matrix; in its shape and dtype.

    Returns:
        A (..., N) in the dtype of ``x`` for each matrix, or the gated one; float32 inside, rounded
        once.
    """
    rows = x if norm is None else mx.fast.rms_norm(x, *norm)
    products = [_product(rows, matrix, fmt, config) for matrix in matrices]
    if gate is not None:
        first, second = products
        return [_ACTIVATIONS[gate](first) * second]
    return products if residual is None else [products[0] + residual]


_ACTIVATIONS = {"silu": nn.silu, "gelu": nn.gelu, "gelu_approx": nn.gelu_approx}


def _product(x: mx.array, matrix: PackedMatrix, fmt: Format, config: FewRows) -> mx.array:
    w, scales, biases, bias = matrix
    (*leading, k), n = x.shape, w.shape[0]
    m = prod(leading)
    tiles = -(-n // config.outputs)
    groups = -(-tiles * config.lanes // config.threads)
    (y,) = _FEW_ROWS(
        [
            x,
            w,
            scales,
            scales if biases is None else biases,
            x if bias is None else bias,
            _shape(m, n, k),
        ],
        template=_template(x.dtype, scales.dtype, fmt, config, bias is not None),
        grid=(groups * config.threads, 1, 1),
        threadgroup=(config.threads, 1, 1),
        output_shapes=[(*leading, n)],
    )
    return y


@cache
def _template(
    dtype: mx.Dtype, scale: mx.Dtype, fmt: Format, config: FewRows, biased: bool
) -> dict[str, mx.Dtype | int | bool]:
    return {
        "T": dtype,
        "S": scale,
        "mode": list(MODES).index(fmt.mode),
        "group": fmt.group_size,
        "bits": fmt.bits,
        "rows": config.rows,
        "outputs": config.outputs,
        "run": config.run,
        "lanes": config.lanes,
        "ways": config.ways,
        "biased": biased,
    }


@cache
def _shape(m: int, n: int, k: int) -> mx.array:
    return mx.array([m, n, k], mx.int32)
