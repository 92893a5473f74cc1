"""Attention of few queries over a long cache, as the tuner sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ...dispatch.tunable import AttentionDecodeProblem as Problem
from ...metal.attention import decode as metal
from ...metal.attention.decode import Decode, Packed
from ...reference import attention as reference
from ...runtime.kernel import MAX_THREADGROUP_MEMORY
from ..family import Family, Inputs, Path, normal
from ..moves import Axis, Group, GroupTop, Local, Unroll, Upcast

# Elements of a group of packed keys and values.
_GROUP = 64


class AttentionDecodeFamily(Family[Problem, Decode]):
    """One query for each of so many rows over the keys of so many caches."""

    problem = Problem
    axes = (
        Axis(GroupTop, "stretch", (16, 32, 64, 128, 256, 512)),
        Axis(GroupTop, "most", (16, 32, 64, 128, 256)),
        Axis(Group, "slice", (16, 32, 64)),
        Axis(Unroll, "blocks", (1, 2, 4)),
        Axis(Upcast, "columns", (1, 2, 4, 8)),
        Axis(Local, "combine", (4, 8, 16)),
    )

    def completed(self, config: Decode, problem: Problem) -> Decode:
        return replace(config, simds=-(-problem.v_width // config.slice))

    def why_not(self, config: Decode, problem: Problem) -> str | None:
        if config.columns > max(1, -(-problem.rows // 8)):
            return f"{config.columns} columns of 8 rows for {problem.rows}"
        if config.columns * config.slice > 256:
            return f"{config.columns * config.slice} sums a lane"
        names = ("columns", "simds", "blocks", "run")
        sizes: dict[str, Any] = {name: getattr(config, name) for name in names}
        memory = metal._memory(T=problem.dtype, D=problem.width, **sizes)
        if memory > MAX_THREADGROUP_MEMORY:
            return f"{memory} bytes of threadgroup memory"
        if config.stretch < config.tile and config.stretch != 16:
            return f"splits of {config.stretch} keys are those of {config.tile}"
        return None

    def inputs(self, problem: Problem) -> Inputs:
        heads, keys = (1, problem.caches * problem.rows, 1), (1, problem.caches, problem.keys)
        shapes = (*heads, problem.width), (*keys, problem.width), (*keys, problem.v_width)
        q, k, v = normal(problem.dtype, *shapes)
        if not problem.bits:
            return [q, k, v]
        return [q, *mx.quantize(k, _GROUP, problem.bits), *mx.quantize(v, _GROUP, problem.bits)]

    def bind(self, inputs: Inputs, problem: Problem, config: Decode) -> Path:
        scale, nothing = problem.width**-0.5, (None,) * 4
        return lambda inputs: metal.attention_decode(*_three(inputs), scale, *nothing, config)

    def paths(self, inputs: Inputs, problem: Problem) -> Mapping[str, Path]:
        scale, nothing = problem.width**-0.5, (None,) * 4
        return {"stock": lambda inputs: reference.attention(*_three(inputs), scale, *nothing)}


def _three(inputs: Inputs) -> tuple[mx.array, mx.array | Packed, mx.array | Packed]:
    """Queries, keys and values, the latter of one array or of three."""
    q, *rest = inputs
    if len(rest) == 2:
        return q, rest[0], rest[1]
    return q, (rest[0], rest[1], rest[2]), (rest[3], rest[4], rest[5])
