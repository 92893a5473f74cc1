"""Launches the kernels that multiply rows with the quantized matrices that they choose."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from ...formats import MODES, Format
from ...runtime.kernel import Kernel

_INPUTS = ("x", "w", "scales", "biases", "factors", "left", "right", "shape")
_FORMAT = ("T", "S", "mode", "group", "bits")

_ROWS = Kernel(
    "gather_qmm_rows",
    "gather_qmm/gather_qmv.metal",
    inputs=_INPUTS,
    outputs=("y",),
    template=(*_FORMAT, "rows", "outputs", "run", "lanes", "ways", "listed", "scaled"),
    large=True,
)
_COLUMNS = Kernel(
    "gather_qmm_columns",
    "gather_qmm/gather_qmv.metal",
    inputs=_INPUTS,
    outputs=("y",),
    template=(*_FORMAT, "rows", "run", "deep", "wide", "lanes", "listed", "scaled"),
    large=True,
)


class Choice(NamedTuple):
    """Which matrix and which rows of x each of P products takes.

    Attributes:
        right: (P,) uint32, the matrix.
        left: (P,) uint32, the block of rows of x; None stands for ``p // share``.
        share: products in a row that take the same block.
        sorted: whether ``right`` is sorted.
    """

    right: mx.array
    left: mx.array | None
    share: int
    sorted: bool

    def blocks(self, x: mx.array) -> mx.array:
        """The rows of x (..., M, K) that each product takes: (P, M, K)."""
        blocks = x.reshape(-1, *x.shape[-2:])
        if self.left is not None:
            return blocks[self.left]
        return blocks if self.share == 1 else mx.repeat(blocks, self.share, 0)


@dataclass(frozen=True)
class Rows:
    """How products with transposed matrices are spread over threads.

    Attributes:
        rows: neighbouring results in a tile, which share what they read of a matrix.
        outputs: columns of the result that one SIMD group, or one thread, computes.
        run: neighbouring elements of a row of a matrix that a thread takes at once; a multiple
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


@dataclass(frozen=True)
class Columns:
    """How products with matrices as they are are spread over threads.

    Attributes:
        rows: neighbouring results in a tile.
        run: neighbouring columns of a thread, as in :class:`Rows`.
        deep: rows of a matrix that a thread unpacks at a time; 1 where ``lanes`` is 32.
        wide: threads that take neighbouring runs; the others of their SIMD group take other
            parts of the sums.
        lanes: threads of a SIMD group: 32, or 1 where threads do not run side by side.
        threads: threads of a threadgroup; a multiple of ``lanes``.
    """

    rows: int
    run: int
    deep: int
    wide: int
    lanes: int
    threads: int


@cache
def configuration(
    device: str, per_pair: int, in_order: bool, transpose: bool, fmt: Format
) -> Rows | Columns:
    """The configuration for a backend.

    Args:
        device: ``"metal"``, ``"cuda"`` or ``"host"``.
        per_pair: rows of each product.
        in_order: whether products with the same matrix are neighbours.
        transpose: whether the products are with transposed matrices.
        fmt: the format of the matrices.
    """
    alone = per_pair == 1 and not in_order
    if device == "host":
        # A thread is a loop of vector instructions: 16 floats fill the widest registers there are.
        rows, run = 1 if alone else 16, fmt.group_size
        if transpose:
            return Rows(rows, outputs=4, run=run, lanes=1, ways=16, threads=8)
        return Columns(rows, run=run, deep=1 if alone else 32, wide=1, lanes=1, threads=8)
    # The sums and unpacked weights must stay within some 100 registers.
    run = 32 if fmt.bits % 2 else 16
    if transpose:
        rows = 1 if alone else 4 if run == 16 else 2
        outputs = 2 if alone and fmt.mode == "affine" else 4
        return Rows(rows, outputs, run=run, lanes=32, ways=1, threads=64)
    return Columns(1 if alone else 64 // run, run=run, deep=1, wide=4, lanes=32, threads=64)


def gather_qmv(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    factors: mx.array | None,
    choice: Choice,
    fmt: Format,
    config: Rows | Columns,
) -> mx.array:
    """P products of M rows each with the packed matrices that they choose.

    Args:
        x: (..., M, K) in float32, float16 or bfloat16.
        w: (..., N, K * bits / 32) uint32 for :class:`Rows`, (..., K, N * bits / 32) for
            :class:`Columns`.
        scales: one a group along the last axis of the matrices.
        biases: as ``scales`` (affine), else None.
        factors: one float32 number for each matrix, or None.
        choice: matrices and rows.
        fmt: group_size, bits and mode of ``w``.
        config: how to spread the work, and whether ``w`` is transposed.

    Returns:
        (P, M, N) in the dtype of ``x``; float32 sums rounded once.
    """
    transposed = isinstance(config, Rows)
    n = w.shape[-2] if transposed else fmt.dims(w)
    (*_, m, k), pairs = x.shape, choice.right.size
    across = config.outputs if isinstance(config, Rows) else config.wide * config.run
    tiles = -(-n // across)
    groups = -(-tiles * config.lanes // config.threads)
    (y,) = (_ROWS if transposed else _COLUMNS)(
        [
            x,
            w,
            scales,
            scales if biases is None else biases,
            _one() if factors is None else factors,
            choice.right if choice.left is None else choice.left,
            choice.right,
            _shape(pairs * m, n, k, m, choice.share),
        ],
        template=_template(
            x.dtype, scales.dtype, fmt, config, choice.left is not None, factors is not None
        ),
        grid=(groups * config.threads, -(-pairs * m // config.rows), 1),
        threadgroup=(config.threads, 1, 1),
        output_shapes=[(pairs, m, n)],
    )
    return y


@cache
def _template(
    dtype: mx.Dtype,
    scale: mx.Dtype,
    fmt: Format,
    config: Rows | Columns,
    listed: bool,
    scaled: bool,
) -> dict[str, mx.Dtype | int | bool]:
    spread = asdict(config)
    del spread["threads"]
    return {
        "T": dtype,
        "S": scale,
        "mode": list(MODES).index(fmt.mode),
        "group": fmt.group_size,
        "bits": fmt.bits,
        **spread,
        "listed": listed,
        "scaled": scaled,
    }


@cache
def _shape(*numbers: int) -> mx.array:
    return mx.array(numbers, mx.int32)


@cache
def _one() -> mx.array:
    return mx.ones((1,))
