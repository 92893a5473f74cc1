"""Launches the kernels that multiply with a quantized matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

import mlx.core as mx

from ..formats import MODES, Format
from ..runtime.kernel import Kernel

MAX_FEW_ROWS = 16

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
def few_rows(device: str, rows: int, fmt: Format) -> FewRows:
    """The configuration for a backend.

    Args:
        device: ``"metal"``, ``"cuda"`` or ``"host"``.
        rows: rows of the product, 1 to 16.
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


def product_of_few_rows(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    bias: mx.array | None,
    fmt: Format,
    config: FewRows,
) -> mx.array:
    """``x @ w.T + bias`` for a packed ``w``, which is read and unpacked once for all rows.

    Args:
        x: (..., K) in float32, float16 or bfloat16; M rows, 1 to 16.
        w: (N, K * bits / 32) uint32.
        scales: (N, K / group_size), floating point (affine) or uint8.
        biases: as ``scales`` (affine), else None.
        bias: (N,) in the dtype of ``x``, or None.
        fmt: group_size, bits and mode of ``w``.
        config: how to spread the work.

    Returns:
        (..., N) in the dtype of ``x``; float32 sums rounded once.
    """
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
