"""Sums of rows, as the tuner sees them: the family to learn from."""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx

from ...dispatch.tunable import RowSumProblem as Problem
from ...metal.common.row_sum import RowSum, row_sum
from ...runtime.spec import Spec
from ..family import Family, Inputs, Path, normal
from ..moves import Group, GroupTop, Local, PadTo, Unroll, Upcast


class RowSumFamily(Family[Problem, RowSum]):
    """Sums of the rows of x (M, K)."""

    problem = Problem
    kinds: ClassVar = {
        "upcast": Upcast,
        "unroll": Unroll,
        "local": Local,
        "group": Group,
        "blocked": GroupTop,
        "padded": PadTo,
    }

    def inputs(self, problem: Problem) -> Inputs:
        return normal(problem.dtype, (problem.m, problem.k))

    def bind(self, inputs: Inputs, problem: Problem, config: RowSum) -> Path:
        launch = row_sum(Spec.of(inputs[0]), config)
        return lambda inputs: [launch(inputs[0])]

    def stock(self, inputs: Inputs, problem: Problem) -> Inputs:
        return [inputs[0].astype(mx.float32).sum(axis=1)]
