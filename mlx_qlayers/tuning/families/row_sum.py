"""Sums of rows, as the tuner sees them: the family to learn from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx

from ...metal.common import row_sum
from ...metal.common.row_sum import RowSum
from ..family import Family, Problem
from ..moves import Axis, Group, GroupTop, Local, PadTo, Unroll, Upcast


class RowSumFamily(Family[RowSum]):
    """Sums of the rows of x (M, K)."""

    name = "row_sum"
    configs = (RowSum,)
    kernels = (row_sum.KERNEL,)
    axes = (
        Axis(Upcast, "upcast", (1, 2, 4)),
        Axis(Unroll, "unroll", (1, 2, 4, 8)),
        Axis(Local, "local", (1, 2, 4, 8)),
        Axis(Group, "group", (1, 2, 4, 8)),
        Axis(GroupTop, "blocked", (False, True)),
        Axis(PadTo, "padded", (False, True)),
    )

    def heuristic(self, problem: Problem, device: str) -> RowSum:
        return RowSum(local=4)

    def why_not(self, config: RowSum, problem: Problem) -> str | None:
        if 32 * config.local * config.group > 256:
            return "more than 256 threads"
        if config.blocked and config.group == 1:
            return "one SIMD group has nothing to split"
        if not config.padded and problem.shape[1] % (32 * config.unroll):
            return f"rows of {problem.shape[1]} are not whole turns"
        return None

    def inputs(self, problem: Problem) -> list[mx.array]:
        return [mx.random.normal(problem.shape).astype(problem.dtype)]

    def run(self, inputs: list[mx.array], problem: Problem, config: RowSum) -> mx.array:
        return row_sum.row_sum(inputs[0], config)

    def reference(self, inputs: list[mx.array], problem: Problem) -> mx.array:
        return inputs[0].astype(mx.float32).sum(axis=1)

    def asked(self, m: int, k: int, dtype: mx.Dtype) -> Problem:
        return Problem((m, k), dtype)

    def paths(self, problem: Problem) -> Mapping[str, Callable[[list[mx.array]], mx.array]]:
        return {"stock": lambda inputs: inputs[0].astype(mx.float32).sum(axis=1)}


ROW_SUM = RowSumFamily()
