"""Launches the kernels of ``linalg.metal``, and what is blocked of them.

All matrices are float32 and have three axes, a batch and the matrix; any strides.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from ...measurements.thresholds import tabled
from ...runtime.devices import device_of
from ...runtime.launch import Bound, Launching
from ...runtime.spec import Spec
from ..common.kernels import constants, strided_kernel

_FILE = "linalg/linalg.metal"
_TILE = 32
_TILE_BYTES = 4 * 32 * 36
# Columns of a threadgroup.
_COLUMNS = 128
# A product's threads, those across a block of rows, and the columns of each. Each value that a
# thread of a GPU reads from threadgroup memory goes into sums of more than one column.
_CPU, _GPU, _LARGE = (128, 128, 1), (64, 64, 2), (128, 32, 4)


def _registers(THREADS: int, **_: object) -> int:
    """Words of a thread's arrays: 32 rows of its column twice, four of a tile, its share of one."""
    return 2 * 36 + _TILE * _TILE // THREADS


_CHOLESKY = strided_kernel(
    "cholesky_block", _FILE, threadgroup_memory=2 * _TILE_BYTES + 4, registers=_registers
)
_SOLVE = strided_kernel("solve_lower", _FILE, threadgroup_memory=_TILE_BYTES, registers=_registers)
_SUBTRACT = strided_kernel(
    "subtract_product",
    _FILE,
    threadgroup_memory=lambda THREADS, ACROSS, **_: THREADS // ACROSS * _TILE_BYTES,
    registers=lambda ACROSS, EACH, **_: EACH * (32 + 8) + _TILE * _TILE // ACROSS,
)


def cholesky(w: Spec, block: int) -> Callable[[mx.array], list[mx.array]]:
    """Binds R of W = R^T R and info, from the upper triangle of W (batch, n, n).

    For each ``block`` rows one launch factorises the diagonal block, a second solves for the rest
    of these rows, a third subtracts their product from what is below.
    """
    batch, n, _ = w.shape
    none, steps = mx.array([0] * batch, mx.int32), []
    for first in range(0, n, block):
        size = min(block, n - first)
        rest = n - first - size
        diagonal, right, below = (
            Spec((batch, *shape), w.dtype) for shape in ((size, size), (size, rest), (rest, rest))
        )
        left = Spec((batch, rest, size), w.dtype)
        solve = _solve(diagonal, right) if rest else None
        update = subtract_product(below, left, right, upper=True) if rest else None
        steps.append((first, size, _factor(diagonal, first), solve, update))

    def run(w: mx.array) -> list[mx.array]:
        if len(steps) == 1:
            return steps[0][2](w, none)
        # Each slice is written in place: nothing else has the array.
        whole, info = mx.zeros((batch, n, n), mx.float32), none
        for first, size, factor, solve, update in steps:
            end = first + size
            r, info = factor(w[:, :size, :size], info)
            whole[:, first:end, first:end] = r
            if solve is not None and update is not None:
                (right,) = solve([r.swapaxes(1, 2), w[:, :size, size:]])
                (w,) = update([w[:, size:, size:], right.swapaxes(1, 2), right])
                whole[:, first:end, end:] = right
        return [whole, info]

    return run


def solve_lower(a: Spec, b: Spec, block: int) -> Callable[[mx.array, mx.array], mx.array]:
    """Binds L^-1 B, by halves down to ``block`` rows, which one launch solves."""
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


def subtract_product(
    b: Spec, a: Spec, x: Spec, upper: bool = False, parts: int | None = None
) -> Bound:
    """Binds ``[B, A, X]`` to ``[B - A X]``; with split-K the sum of its ``parts`` is the result."""
    (batch, n, m), device = b.shape, device_of()
    threads, across, each = _GPU if device.gpu else _CPU
    if device.spills and n > _TILE:
        threads, across, each = _LARGE
    wide, high = -(-m // (across * each)), -(-n // (_TILE * threads // across))
    return _SUBTRACT.bind(
        [b, a, x],
        template={"THREADS": threads, "ACROSS": across, "EACH": each, "UPPER": upper},
        grid=(batch * threads * wide, high, parts or 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[b.shape if parts is None else (parts, *b.shape)],
    )


def product(batch: int, n: int, k: int, m: int) -> Callable[[mx.array, mx.array], mx.array]:
    """-A X of (batch, n, k) and (batch, k, m); a long k is shared out where little else is."""
    shapes = ((batch, n, m), (batch, n, k), (batch, k, m))
    b, a, x = (Spec(shape, mx.float32) for shape in shapes)
    groups = batch * -(-n // _TILE) * -(-m // _COLUMNS)
    of = tabled("linalg_block")
    parts = 1 if not device_of().gpu else max(1, min(of["groups"] // groups, k // of["depth"]))
    launch = subtract_product(b, a, x, parts=None if parts == 1 else parts)
    zeros = constants([0.0], mx.float32)

    def run(a: mx.array, x: mx.array) -> mx.array:
        (y,) = launch([mx.broadcast_to(zeros[:1], b.shape), a, x])
        return y if parts == 1 else y.sum(axis=0)

    return run


def _factor(w: Spec, first: int) -> Launching:
    """Binds R and info of a diagonal block that begins at a row, from W and info so far."""
    batch, n, _ = w.shape
    threads = max(_TILE, 1 << (n - 1).bit_length())  # few programs for all sizes
    before, offset = Spec((batch,), mx.int32), mx.array(first)
    launch = _CHOLESKY.bind(
        [w, before, Spec.of(offset)],
        template={"THREADS": threads},
        grid=(threads * batch, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[w.shape, (batch,)],
    )
    return Launching(launch, (0, 1), [offset])


def _solve(a: Spec, b: Spec) -> Bound:
    # SIMD groups of one threadgroup wait for each other's reads of threadgroup memory.
    threads = _TILE if b.shape[2] <= _TILE or device_of().spills else _COLUMNS
    return _SOLVE.bind(
        [a, b],
        template={"THREADS": threads},
        grid=(b.shape[0] * -(-b.shape[2] // threads) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[b.shape],
    )
