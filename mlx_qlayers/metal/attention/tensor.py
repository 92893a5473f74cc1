"""Launches attention of many queries by Metal 4's tensor operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ...runtime.devices import device_of
from ...runtime.launch import Bound, Size
from ...runtime.spec import Spec
from ..common.kernels import strided_kernel
from .forward import Launcher

# Keys of a step of the loop, and queries that a SIMD group owns.
TILE, ROWS = 32, 16
_SIMDS = 4
_THREADS = 32 * _SIMDS, 1, 1
# Columns of the result that leave room in registers.
_WIDEST = 128


def _registers(DV: int, SPLIT: int, TILE: int = TILE, **_: object) -> int:
    """Words of the tensors of a thread: scores and weights, sums, statistics of rows."""
    return 2 * ROWS * TILE // 32 + ROWS * DV // SPLIT // 32 + 4 * ROWS // 8


def _threadgroup_memory(SIMDS: int, TILE: int, LOCKSTEP: bool, **_: object) -> int:
    """Bytes of scores that are not handed over, and of two numbers for each row."""
    return 4 if LOCKSTEP else 4 * SIMDS * ROWS * (TILE + 2)


_FORWARD = strided_kernel(
    "attention_tensor",
    "attention/tensor_forward.metal",
    threadgroup_memory=_threadgroup_memory,
    registers=_registers,
)


def _registers_of_gradient(
    D: int, DV: int, SPLIT: int, VALUES: bool | None = None, **_: object
) -> int:
    """Likewise of the gradient of queries, with statistics, or without that of keys or values."""
    statistics = 5 * ROWS // 8 if VALUES is None else 0
    return 3 * ROWS * TILE // 32 + ROWS * (DV if VALUES else D) // SPLIT // 32 + statistics


_QUERIES, _MASK = (
    strided_kernel(
        name,
        "attention/tensor_queries.metal",
        function="attention_tensor_queries",
        omitted=omitted,
        threadgroup_memory=_threadgroup_memory,
        registers=registers,
    )
    for name, omitted, registers in (
        ("attention_tensor_queries", ("d_scores",), _registers_of_gradient),
        ("attention_tensor_mask", ("d_q", "delta"), 3 * ROWS * TILE // 32 + 10),
    )
)
_KEYS = strided_kernel(
    "attention_tensor_keys",
    "attention/tensor_keys.metal",
    threadgroup_memory=_threadgroup_memory,
    registers=_registers_of_gradient,
)


def why_no_tensors(at: Launcher) -> str | None:
    """Why tensor operations do not take these shapes, if they do not."""
    fewest = min(at.keys, at.queries)
    return f"{fewest} queries or keys, fewer than {TILE}" if fewest < TILE else None


def _parts(width: int) -> int:
    return -(-width // _WIDEST)


def _grid(at: Launcher, rows: int, heads: int) -> Size:
    return -(-rows // (ROWS * _SIMDS)) * 32 * _SIMDS, heads, at.batch


def _spread(at: Launcher, split: int, others: int = 0) -> dict[str, Any]:
    """How the work is spread over SIMD groups; in lockstep they take more of `others` at once."""
    lockstep = _lockstep(at)
    tile = 2 * TILE if lockstep and others >= 2 * TILE else TILE
    # Of 64 rows two tiles of each operand, in dynamic shared memory.
    shared = 65536 if tile > TILE else 0
    values = {"SIMDS": _SIMDS, "SPLIT": split, "TILE": tile}
    return {**values, "LOCKSTEP": lockstep, "SHARED": shared, "HANDED": lockstep or at.handed}


def _lockstep(at: Launcher) -> bool:
    """Whether SIMD groups run their loops in lockstep: with tensor cores they share operands."""
    return device_of(at.device).tensor_cores


def attention_tensor(at: Launcher) -> Callable[..., list[mx.array]]:
    """The launch of :func:`~.forward.attention_forward` by tensor operations."""
    split = _parts(at.v_width)
    grid = _grid(at, at.queries, at.heads * split)
    launch = at.forward(_FORWARD, grid, _THREADS, **_spread(at, split, at.keys), RESIDENT=3)
    # Rows may lie anywhere, but the columns of a tensor are neighbours.
    return lambda q, k, v, mask, sinks: launch(*map(mx.contiguous, (q, k, v)), mask, sinks)


def tensor_mask_gradient(at: Launcher, others: Sequence[Spec]) -> Bound:
    """Binds the gradient (B, H, L, S) of an additive mask from out, its cotangent and norms."""
    grid, shape = _grid(at, at.queries, at.heads), (at.batch, at.heads, at.queries, at.keys)
    launch = at.bind(_MASK, others, grid, _THREADS, [shape], init_value=0, **_spread(at, 1))
    return lambda arrays: launch(_dense(arrays))


def _dense(arrays: list[mx.array]) -> list[mx.array]:
    """With q, k, v and d_out such that their columns are neighbours."""
    q, k, v, mask, out, d_out, *rest = arrays
    return [*map(mx.contiguous, (q, k, v)), mask, out, mx.contiguous(d_out), *rest]


def tensor_gradients(at: Launcher, others: Sequence[Spec], average: Spec) -> tuple[Bound, Bound]:
    """Binds d_q and delta by one function, d_k and d_v by another, as in backward.py.

    ``average`` is the part of each value in queries that see no key, if there are any.
    """
    rows, split = (at.batch, at.heads, at.queries), _parts(at.width)
    shapes = [(at.batch, at.queries, at.heads, at.width), rows]
    grid = _grid(at, at.queries, at.heads * split)
    of_queries = at.bind(_QUERIES, others, grid, _THREADS, shapes, **_spread(at, split))
    more = [*others[1:], Spec(rows, mx.float32), average]

    def of(width: int, values: bool) -> Bound:
        split = _parts(width)
        grid = _grid(at, at.keys, at.kv_heads * split)
        shape = at.batch, at.keys, at.kv_heads, width
        told = {"AVERAGE": at.average, "VALUES": values}
        told |= _spread(at, split, at.queries if values else 0)
        return at.bind(_KEYS, more, grid, _THREADS, [shape], **told)

    of_k, of_v = of(at.width, False), of(at.v_width, True)

    def keys(arrays: list[mx.array]) -> list[mx.array]:
        q, k, v, mask, d_out, *rest = arrays
        given = [*map(mx.contiguous, (q, k, v)), mask, mx.contiguous(d_out), *rest]
        return [of_k(given)[0], of_v(given)[0]]

    return lambda arrays: of_queries(_dense(arrays)), keys
