"""Launches the kernels of ``linalg.metal``, and what is blocked of them.

All matrices are float32 and have three axes, a batch and the matrix; any strides.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ...runtime.backend import backend
from ...runtime.kernel import Kernel
from ...runtime.launch import Bound
from ...runtime.spec import Spec

_FILE = "linalg/linalg.metal"
_TILE = 32
_TILE_BYTES = 4 * 32 * 36
# Columns of a threadgroup. A thread of products owns two on GPUs: each value that it reads from
# threadgroup memory goes into two sums.
_COLUMNS, _EACH = 128, 2

# Words of a thread's arrays for each column: 32 rows of it, and four of a tile.
_REGISTERS = 36

_CHOLESKY = Kernel(
    "cholesky_block",
    _FILE,
    inputs=("w",),
    outputs=("r", "info"),
    template=("THREADS",),
    threadgroup_memory=2 * _TILE_BYTES + 132,
    registers=_REGISTERS,
    large=True,
    ensure_row_contiguous=False,
)
_SOLVE = Kernel(
    "solve_lower",
    _FILE,
    inputs=("l", "b"),
    outputs=("x",),
    template=("THREADS",),
    threadgroup_memory=_TILE_BYTES + 128,
    registers=_REGISTERS,
    large=True,
    ensure_row_contiguous=False,
)
_SUBTRACT = Kernel(
    "subtract_product",
    _FILE,
    inputs=("b", "a", "x"),
    outputs=("y",),
    template=("THREADS", "EACH", "UPPER"),
    threadgroup_memory=_TILE_BYTES,
    registers=lambda EACH, **_: EACH * _REGISTERS,
    large=True,
    ensure_row_contiguous=False,
)


def cholesky(w: Spec, block: int) -> Callable[[mx.array], tuple[mx.array, mx.array]]:
    """From W (batch, n, n), of which the upper triangle is read, to R of W = R^T R and info.

    Each launch of one threadgroup a matrix factorises ``block`` rows, a second one solves for the
    rest of these rows, a third subtracts their product from what is below.

    Returns:
        A function of W that gives R (batch, n, n), upper triangular, and (batch,) int32: 0, or the
        order of the first leading minor that is not positive, from whose row on R is NaN.
    """
    batch, n, _ = w.shape
    steps = []
    for first in range(0, n, block):
        size = min(block, n - first)
        rest = n - first - size
        diagonal, right = (Spec((batch, size, k), w.dtype) for k in (size, rest))
        below = Spec((batch, rest, rest), w.dtype)
        solve = _solve(diagonal, right) if rest else None
        left = Spec((batch, rest, size), w.dtype)
        update = subtract_product(below, left, right, upper=True) if rest else None
        steps.append((first, size, _factor(diagonal), solve, update))

    def run(w: mx.array) -> tuple[mx.array, mx.array]:
        if len(steps) == 1:
            r, info = steps[0][2]([w])
            return r, info
        rows, minors = [], []
        for first, size, factor, solve, update in steps:
            r, info = factor([w[:, :size, :size]])
            row = [mx.zeros((batch, size, first), w.dtype), r]
            minors.append(mx.where(info > 0, info + first, 0))
            if solve is not None and update is not None:
                (right,) = solve([r.swapaxes(1, 2), w[:, :size, size:]])
                (w,) = update([w[:, size:, size:], right.swapaxes(1, 2), right])
                row.append(right)
            rows.append(mx.concatenate(row, axis=2))
        # Behind a minor that fails all pivots are NaN, which do not fail.
        return mx.concatenate(rows, axis=1), mx.stack(minors).max(axis=0)

    return run


def solve_lower(a: Spec, b: Spec, block: int) -> Callable[[mx.array, mx.array], mx.array]:
    """From L (batch, n, n), of which the lower triangle is read, and B (batch, n, m) to L^-1 B.

    Halves the system until it has at most ``block`` rows, which one launch solves.
    """
    (batch, n, _), m = a.shape, b.shape[2]
    if n <= block:
        launch = _solve(a, b)
        return lambda a, b: launch([a, b])[0]
    half = (n // block + 1) // 2 * block
    upper, lower = (
        solve_lower(Spec((batch, k, k), a.dtype), Spec((batch, k, m), a.dtype), block)
        for k in (half, n - half)
    )
    rest, left, right = (
        Spec((batch, *size), a.dtype) for size in ((n - half, m), (n - half, half), (half, m))
    )
    update = subtract_product(rest, left, right)

    def run(a: mx.array, b: mx.array) -> mx.array:
        x = upper(a[:, :half, :half], b[:, :half])
        (rest,) = update([b[:, half:], a[:, half:, :half], x])
        return mx.concatenate([x, lower(a[:, half:, half:], rest)], axis=1)

    return run


def subtract_product(b: Spec, a: Spec, x: Spec, upper: bool = False) -> Bound:
    """The launch that computes ``[B - A X]`` from ``[B, A, X]``.

    Args:
        b: (batch, n, m).
        a: (batch, n, k).
        x: (batch, k, m).
        upper: leave out what is well below the diagonal.
    """
    batch, n, m = b.shape
    each = 1 if backend() == "host" else _EACH
    threads = _COLUMNS // each
    return _SUBTRACT.bind(
        [b, a, x],
        template={"THREADS": threads, "EACH": each, "UPPER": upper},
        grid=(batch * _whole(m, _COLUMNS) // each, -(-n // _TILE), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[b.shape],
    )


def _factor(w: Spec) -> Bound:
    batch, n, _ = w.shape
    threads = max(_TILE, 1 << (n - 1).bit_length())  # few programs for all sizes
    return _CHOLESKY.bind(
        [w],
        template={"THREADS": threads},
        grid=(threads * batch, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[w.shape, (batch,)],
        output_dtypes=[mx.float32, mx.int32],
    )


def _solve(a: Spec, b: Spec) -> Bound:
    threads = _TILE if b.shape[2] <= _TILE else _COLUMNS
    return _SOLVE.bind(
        [a, b],
        template={"THREADS": threads},
        grid=(b.shape[0] * _whole(b.shape[2], threads), 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[b.shape],
    )


def _whole(size: int, of: int) -> int:
    return -(-size // of) * of
