"""Launches qvm: up to 16 rows times a quantized matrix that is not transposed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import mlx.core as mx

from ...formats import Format
from ...options import MatmulCall
from ...runtime.kernel import Kernel
from .qmm import PRODUCT_INPUTS, PRODUCT_TEMPLATE, split_k
from .qmv_config import MAX_QMV_ROWS


def _threadgroup_memory(run: int, columns: int, shares: int, **_: object) -> int:
    return 4 * columns * run * shares if shares > 1 else 4


def _registers(rows: int, run: int, block: int, **_: object) -> int:
    """Words of the arrays of a thread: sums and weights."""
    return (rows + block) * run


_QVM = Kernel(
    "qvm",
    "quantized_matmul/qvm.metal",
    inputs=PRODUCT_INPUTS,
    outputs=("y",),
    template=(*PRODUCT_TEMPLATE, "rows", "run", "block", "columns", "shares", "biased"),
    threadgroup_memory=_threadgroup_memory,
    registers=_registers,
    large=True,
)


@dataclass(frozen=True)
class QvmConfig:
    """How qvm is spread over threads.

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
    """The configuration for ``"metal"``, ``"cuda"`` or ``"host"``, of 1 to 16 rows."""
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


def qvm(call: MatmulCall, config: QvmConfig) -> Callable[..., mx.array]:
    """The launch of ``x @ w + bias`` for 1 to 16 rows: ``w`` is read and unpacked once for all.

    Returns:
        A function of x, w, scales, biases and bias that gives (..., N) in the dtype of ``x``;
        float32 sums rounded once.
    """
    _, n, k = call.shape
    step = config.shares * config.block
    depth = -(-k // (config.parts * step)) * step
    blocks = -(-n // (config.run * config.columns))
    template = asdict(config)
    del template["parts"]
    return split_k(
        _QVM,
        call,
        depth,
        template=template,
        grid=(blocks * config.columns, config.shares, -(-k // depth)),
        threadgroup=(config.columns, config.shares, 1),
    )
