"""Sums of rows: the smallest kernel with every option that the tuner knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import mlx.core as mx

from ...runtime.kernel import Kernel
from ...runtime.spec import Spec

KERNEL = Kernel(
    "row_sum",
    "common/row_sum.metal",
    inputs=("x", "shape"),
    outputs=("y",),
    template=("T", "upcast", "unroll", "local", "group", "blocked", "padded"),
    threadgroup_memory=lambda upcast, local, group, **_: 4 * upcast * local * group,
    registers=lambda upcast, unroll, **_: upcast * (1 + unroll),
    large=True,
)


@dataclass(frozen=True)
class RowSum:
    """How the sums are spread over threads; :mod:`mlx_qlayers.tuning.moves` explains each option.

    Attributes:
        upcast: rows that a SIMD group sums side by side.
        unroll: neighbours that a lane reads at each step.
        local: teams of SIMD groups in a threadgroup, each with rows of its own.
        group: SIMD groups of a team, which share its rows.
        blocked: whether a member takes one part of a row, not every ``group``-th turn.
        padded: whether the last turn may reach beyond the row.
    """

    upcast: int = 1
    unroll: int = 1
    local: int = 1
    group: int = 1
    blocked: bool = False
    padded: bool = True


def row_sum(x: Spec, config: RowSum) -> Callable[[mx.array], mx.array]:
    """The launch of the sums of the rows of a matrix.

    Args:
        x: (M, K) in float32, float16 or bfloat16.
        config: how to spread the work.

    Returns:
        A function of ``x`` that gives (M,) float32.

    Raises:
        ValueError: ``config`` needs a K that is a multiple of what its SIMD groups take in a turn.

    Example:
        >>> x = mx.ones((3, 5))
        >>> row_sum(x, RowSum(unroll=4))(x)
        array([5, 5, 5], dtype=float32)
    """
    m, k = x.shape
    if not config.padded and k % (32 * config.unroll):
        raise ValueError(f"rows of {k} are not whole turns of {32 * config.unroll}: pad them")
    threads, shape = 32 * config.local * config.group, mx.array([m, k], mx.int32)
    launch = KERNEL.bind(
        [x, shape],
        template={"T": x.dtype, **asdict(config)},
        grid=(threads, -(-m // (config.upcast * config.local)), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(m,)],
    )
    return lambda x: launch([x, shape])[0]
