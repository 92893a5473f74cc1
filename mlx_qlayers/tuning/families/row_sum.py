"""Sums of rows, as the tuner sees them: the family to learn from."""

from __future__ import annotations

import mlx.core as mx

from ...dispatch.tunable import RowSumProblem as Problem
from ...metal.common.row_sum import RowSum, row_sum
from ...runtime.spec import Spec
from ..family import Family, Inputs, Path, normal
from ..moves import Group, GroupTop, Local, PadTo, Unroll, Upcast


class RowSumFamily(Family[Problem, RowSum]):
    """Sums of the rows of x (M, K)."""

    problem = Problem
    moves = (
        Upcast("upcast", (1, 2, 4)),
        Unroll("unroll", (1, 2, 4, 8)),
        Local("local", (1, 2, 4, 8)),
        Group("group", (1, 2, 4, 8)),
        GroupTop("blocked", (False, True)),
        PadTo("padded", (False, True)),
    )

    def why_not(self, config: RowSum, problem: Problem) -> str | None:
        if 32 * config.local * config.group > 256:
            return "more than 256 threads"
        if config.blocked and config.group == 1:
            return "one SIMD group has nothing to split"
        if not config.padded and problem.k % (32 * config.unroll):
            return f"rows of {problem.k} are not whole turns"
        return None

    def inputs(self, problem: Problem) -> Inputs:
        return normal(problem.dtype, (problem.m, problem.k))

    def bind(self, inputs: Inputs, problem: Problem, config: RowSum) -> Path:
        launch = row_sum(Spec.of(inputs[0]), config)
        return lambda inputs: launch(inputs[0])

    def stock(self, inputs: Inputs, problem: Problem) -> mx.array:
        return inputs[0].astype(mx.float32).sum(axis=1)
