"""Launches qvm: up to 16 rows times a quantized matrix, untransposed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import mlx.core as mx

from ...formats import MODES, Format
from ...runtime.kernel import Kernel
from ...runtime.spec import Spec
from .qmm import split_k
from .qmv import MAX_QMV_ROWS


def _threadgroup_memory(run: int, columns: int, shares: int, **_: object) -> int:
    return 4 * columns * run * shares if shares > 1 else 4


_QVM = Kernel(
    "qvm",
    "quantized_matmul/qvm.metal",
    inputs=("x", "w", "scales", "biases", "bias", "shape"),
    outputs=("y",),
    template=(
        "T",
        "O",
        "S",
        "mode",
        "group",
        "bits",
        "rows",
        "run",
        "block",
        "columns",
        "shares",
        "biased",
    ),
    threadgroup_memory=_threadgroup_memory,
    large=True,
)


@dataclass(frozen=True)
class QvmConfig:
    """How a product of few rows with an untransposed matrix is spread over threads.

    Attributes:
        rows: rows that the kernel is compiled for; a product may have fewer.
        run: columns that a thread owns; 16 or 32, whole words, and divides the group size.
        block: rows of the matrix that it unpacks before it multiplies them.
        columns: threads of a threadgroup side by side.
        shares: threads of it that share the columns and the depth.
        parts: threadgroups that share the depth; above 1 a second launch adds their sums.
    """

    rows: int
    run: int
    block: int
    columns: int
    shares: int = 1
    parts: int = 1


def qvm_config(device: str, rows: int, n: int, k: int, fmt: Format) -> QvmConfig:
    """The configuration for a backend.

    Args:
        device: ``"metal"``, ``"cuda"`` or ``"host"``.
        rows: rows of the product, 1 to 16.
        n: columns of it.
        k: its depth.
        fmt: the format of the matrix.
    """
    if device == "host":
        # The sums of a row fill two of the widest vectors there are while they meet eight weights.
        rows = 1 if rows == 1 else MAX_QMV_ROWS
        return QvmConfig(rows, min(fmt.group_size, 32), block=8, columns=8)
    run = 32 if fmt.bits % 2 else 16
    rows = next(size for size in (1, 2, 4, 8, MAX_QMV_ROWS) if size >= rows)
    # Enough threads for a large GPU.
    across = -(-n // (32 * run))
    parts = max(1, min(256 // across, k // 64))
    return QvmConfig(rows, run, 1 if rows > 1 else 2, columns=32, shares=8, parts=parts)


def qvm(
    x: Spec,
    w: Spec,
    scales: Spec,
    biases: Spec | None,
    bias: Spec | None,
    fmt: Format,
    config: QvmConfig,
) -> Callable[..., mx.array]:
    """The launch of ``x @ w + bias`` for a packed ``w``, read and unpacked once for all rows.

    Args:
        x: (..., K) in float32, float16 or bfloat16; M rows, 1 to 16.
        w: (K, N * bits / 32) uint32.
        scales: (K, N / group_size), floating point (affine) or uint8.
        biases: as ``scales`` (affine), else None.
        bias: (N,) in the dtype of ``x``, or None.
        fmt: group_size, bits and mode of ``w``.
        config: how to spread the work.

    Returns:
        A function of these arrays that gives (..., N) in the dtype of ``x``; float32 sums rounded
        once.
    """
    (*leading, k), m, n = x.shape, prod(x.shape[:-1]), fmt.dims(w)
    step = config.shares * config.block
    depth = -(-k // (config.parts * step)) * step
    parts = -(-k // depth)
    blocks = -(-n // (config.run * config.columns))
    return split_k(
        _QVM,
        (x, w, scales, biases, bias, [m, n, k, depth], parts),
        template={
            "T": x.dtype,
            "S": scales.dtype,
            "mode": list(MODES).index(fmt.mode),
            "group": fmt.group_size,
            "bits": fmt.bits,
            "rows": config.rows,
            "run": config.run,
            "block": config.block,
            "columns": config.columns,
            "shares": config.shares,
        },
        grid=(blocks * config.columns, config.shares, parts),
        threadgroup=(config.columns, config.shares, 1),
        shape=(*leading, n),
    )
